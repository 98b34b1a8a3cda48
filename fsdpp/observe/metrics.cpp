#include "fsdpp/observe/metrics.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "fsdpp/base/error.h"

namespace fsdpp::observe {
namespace {

/// Length of the well-formed UTF-8 sequence that `bytes` begins with, 0 when there is none (Unicode 15, table
/// 3-7).
size_t utf8_sequence(std::string_view bytes) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned char lead = at(0);
  if (lead < 0x80) return 1;
  size_t length = 0;
  unsigned char low =
      0x80;  // bounds of the second byte: no overlong forms, no surrogates, nothing past U+10FFFF
  unsigned char high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  }
  if (length == 0 || bytes.size() < length || at(1) < low || at(1) > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if ((at(i) & 0xC0) != 0x80) return 0;
  }
  return length;
}

nlohmann::ordered_json object(const Fields& fields) {
  auto json = nlohmann::ordered_json::object();
  for (const auto& [name, value] : fields) {
    std::visit(
        [&](const auto& v) {
          if constexpr (std::is_same_v<std::decay_t<decltype(v)>, std::string>) {
            json[valid_utf8(name)] = valid_utf8(v);
          } else {
            json[valid_utf8(name)] = v;
          }
        },
        value);
  }
  return json;
}

void make_folder_of(const std::string& path) {
  const auto folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw EnvironmentError(text("cannot make the folder of ", path, ": ", error.message(),
                                "; name another path or make the folder writable"));
  }
}

[[noreturn]] void cannot_write(const std::string& path, int error) {
  throw EnvironmentError(text("cannot write ", path, ": ", std::strerror(error),
                              "; name another path, or make room or permission for this one"));
}

// What `path` names when it is a link, also to a file that there is not yet.
std::string behind_links(const std::string& path) {
  std::filesystem::path target = path;
  std::error_code error;
  constexpr int kMostLinks = 40;
  for (int i = 0; i < kMostLinks && std::filesystem::is_symlink(target, error); ++i)
    target = target.parent_path() / std::filesystem::read_symlink(target, error);
  return target.string();
}

// Else a device or a pipe, which is written into and never replaced.
bool is_file_or_nothing(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  return !std::filesystem::exists(status) || std::filesystem::is_regular_file(status);
}

}  // namespace

std::string valid_utf8(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  while (!bytes.empty()) {
    const size_t length = utf8_sequence(bytes);
    if (length > 0) {
      out.append(bytes.substr(0, length));
      bytes.remove_prefix(length);
      continue;
    }
    std::array<char, 8> escaped{};
    std::snprintf(escaped.data(), escaped.size(), "\\x%02x", static_cast<unsigned char>(bytes[0]));
    out.append(escaped.data());
    bytes.remove_prefix(1);
  }
  return out;
}

std::string to_json(const Fields& fields) { return object(fields).dump(); }

MetricsWriter::MetricsWriter(std::string path) : path_(std::move(path)) {
  if (path_.empty()) return;
  make_folder_of(path_);
  errno = 0;
  file_.open(path_, std::ios::trunc | std::ios::binary);
  if (!file_) cannot_write(path_, errno);
}

void MetricsWriter::write(const Fields& fields) {
  if (path_.empty()) return;
  errno = 0;
  file_ << to_json(fields) << '\n' << std::flush;
  if (!file_) cannot_write(path_, errno);
}

void write_results(const std::string& path, const Fields& fields) {
  make_folder_of(path);
  const std::string target = behind_links(path);
  const bool replaced = is_file_or_nothing(target);
  const std::string fresh = replaced ? target + ".new" : target;
  const auto give_up = [&](int error) {
    if (replaced) std::remove(fresh.c_str());
    cannot_write(path, error);
  };
  errno = 0;
  std::ofstream file(fresh, std::ios::trunc | std::ios::binary);
  file << object(fields).dump(2) << '\n' << std::flush;
  file.close();
  if (!file) give_up(errno);
  if (replaced && std::rename(fresh.c_str(), target.c_str()) != 0) give_up(errno);
}

}  // namespace fsdpp::observe
