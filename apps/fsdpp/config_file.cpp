// Reads the TOML file: the only file that sees toml++.
#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>

#include "apps/fsdpp/config.h"
#include "apps/fsdpp/config_table.h"
#include "fsdpp/base/error.h"

namespace fsdpp::app {
namespace {

std::string read_file(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) error = std::make_error_code(std::errc::is_a_directory);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!error && !file) error = std::error_code(errno, std::generic_category());
  if (error) {
    throw UsageError(text("--config \"", path, "\": ", error.message(),
                          "; expected a readable TOML file: name another one or leave --config out"));
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

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

void read_toml(Config& config, const std::string& path) {
  toml::table document;
  try {
    document = toml::parse(read_file(path), path);
  } catch (const toml::parse_error& error) {
    throw UsageError(text(at(path, error.source()), ": not TOML: ", error.description(),
                          "; expected lines such as steps = 100 below [train]"));
  }
  for (const auto& [name, node] : document) read_section(config, path, std::string(name.str()), node);
}

}  // namespace

Config load_config(const std::string& path, const std::vector<Override>& overrides) {
  Config config;
  if (!path.empty()) read_toml(config, path);
  for (const auto& [key, value] : overrides) {
    const Entry* entry = find_entry(key);
    require(entry != nullptr, "--", key, " is not an option", suggestion(key, keys()));
    assign_text(config, *entry, value);
  }
  return config;
}

}  // namespace fsdpp::app
