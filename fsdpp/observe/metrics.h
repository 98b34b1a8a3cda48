#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace fsdpp::observe {

/// One value of a JSON object. Numbers that JSON cannot say (NaN, infinity) are written as null.
using Value = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<double>>;

/// Names and values in the order in which they are written.
using Fields = std::vector<std::pair<std::string, Value>>;

/// `bytes` with everything that is not UTF-8 spelled out as \xNN, so that it can stand in a JSON string.
[[nodiscard]] std::string valid_utf8(std::string_view bytes);

/// `fields` as one JSON object on one line, without a line end. Texts pass through valid_utf8.
[[nodiscard]] std::string to_json(const Fields& fields);

/// A file with one JSON object per line, readable while it grows: every line is flushed.
class MetricsWriter {
 public:
  /// An empty `path` writes nothing. Makes missing folders and replaces an earlier file.
  /// Throws EnvironmentError that names the path when it cannot be written.
  explicit MetricsWriter(std::string path);

  /// Appends one line. Throws EnvironmentError that names the path when the disk does not take it.
  void write(const Fields& fields);

 private:
  std::string path_;
  std::ofstream file_;
};

/// Replaces the file at `path` by one JSON object, all or nothing (a second file, renamed). Makes missing
/// folders. Throws EnvironmentError that names the path when it cannot be written.
void write_results(const std::string& path, const Fields& fields);

}  // namespace fsdpp::observe
