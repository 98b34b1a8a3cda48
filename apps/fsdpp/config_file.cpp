// Reads the TOML file: the only file that sees toml++.
#define TOML_HEADER_ONLY 1
#include <sys/mman.h>
#include <toml++/toml.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>

#include "apps/fsdpp/config.h"
#include "apps/fsdpp/config_table.h"
#include "fsdpp/base/error.h"

namespace fsdpp::app {
namespace {

std::string at(const std::string& path, const toml::source_region& source) {
  return text(path, ":", source.begin.line);
}

std::optional<Scalar> scalar_of(const toml::node& node) {
  if (const auto* whole = node.as_integer()) return Scalar{whole->get()};
  if (const auto* number = node.as_floating_point()) return Scalar{number->get()};
  if (const auto* truth = node.as_boolean()) return Scalar{truth->get()};
  if (const auto* name = node.as_string()) return Scalar{name->get()};
  return std::nullopt;
}

std::string kind_of(const toml::node& node) {
  if (node.is_array()) return "a list";
  if (node.is_table()) return "a table";
  return "a date or time";
}

void read_value(Config& config, const std::string& path, const std::string& key, const toml::node& node) {
  const std::string where = at(path, node.source());
  const Entry* entry = find_entry(key);
  if (entry == nullptr) throw UsageError(text(where, ": ", key, " is not a key", suggestion(key, keys())));
  const auto scalar = scalar_of(node);
  if (!scalar) {
    throw UsageError(text(where, ": ", key, " is ", kind_of(node), ": expected ", expected(*entry),
                          "; write for example ", key.substr(key.find('.') + 1), " = ",
                          default_text(*entry).empty() ? "\"PATH\"" : default_text(*entry)));
  }
  assign(config, *entry, *scalar, where);
}

void read_section(Config& config, const std::string& path, const std::string& name, const toml::node& node) {
  const std::string where = at(path, node.source());
  const auto known = sections();
  const bool is_section = std::find(known.begin(), known.end(), name) != known.end();
  const auto* table = node.as_table();
  if (table == nullptr && is_section) {
    throw UsageError(text(where, ": ", name, " is a section: expected [", name, "] with its keys below it"));
  }
  if (table == nullptr) {
    throw UsageError(
        text(where, ": ", name, " is not a key; keys stand in a section", suggestion(name, keys())));
  }
  if (!is_section) {
    throw UsageError(text(where, ": [", name, "] is not a section", suggestion(name, known)));
  }
  for (const auto& [key, value] : *table) read_value(config, path, text(name, ".", key.str()), value);
}

void read_toml(Config& config, const std::string& path, const std::string& content) {
  toml::table document;
  try {
    document = toml::parse(content, path);
  } catch (const toml::parse_error& error) {
    throw UsageError(text(at(path, error.source()), ": not TOML: ", error.description(),
                          "; expected lines such as steps = 100 below [train]"));
  }
  for (const auto& [name, node] : document) read_section(config, path, std::string(name.str()), node);
}

}  // namespace

std::string read_config(const std::string& path) {
  std::string content;
  std::array<char, 4096> part{};
  std::FILE* const file = std::fopen(path.c_str(), "rb");
  std::size_t count = 1;
  while (file != nullptr && count > 0) {
    count = std::fread(part.data(), 1, part.size(), file);
    content.append(part.data(), count);
  }
  const int error = file == nullptr || std::ferror(file) != 0 ? errno : 0;
  if (file != nullptr) std::fclose(file);
  require(error == 0, "--config \"", path, "\": ", std::strerror(error),
          "; expected a readable TOML file: name another one or leave --config out");
  return content;
}

std::string kept_config(const std::string& content) {
  const int memory = memfd_create("configuration", 0);  // without MFD_CLOEXEC: it is for others
  const auto size = static_cast<ssize_t>(content.size());
  if (memory < 0 || write(memory, content.data(), content.size()) != size) {
    throw EnvironmentError(text("cannot keep the configuration for the ranks: ", std::strerror(errno),
                                "; raise the limit of open files (ulimit -n) or free memory"));
  }
  return text("/proc/self/fd/", memory);
}

Config load_config(const std::string& path, const std::string& content,
                   const std::vector<Override>& overrides) {
  Config config;
  read_toml(config, path, content);
  for (const auto& [key, value] : overrides) {
    const Entry* entry = find_entry(key);
    require(entry != nullptr, "--", key, " is not an option", suggestion(key, keys()));
    assign_text(config, *entry, value);
  }
  return config;
}

}  // namespace fsdpp::app
