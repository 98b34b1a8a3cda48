#pragma once

#include <string>
#include <vector>

namespace fsdpp::observe {

/// `value` with a comma between groups of three digits: 1234567 is "1,234,567".
[[nodiscard]] std::string with_commas(long long value);

/// A table of text in aligned columns: the first column to the left, the others to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> header);

  /// Throws UsageError unless there is one cell per column.
  void row(std::vector<std::string> cells);
  /// A rule above the next row, for totals.
  void rule();

  /// All lines, each with a line end and `indent` spaces in front.
  [[nodiscard]] std::string str(int indent = 2) const;

 private:
  std::vector<std::vector<std::string>> rows_;  // the header first; an empty row is a rule
};

}  // namespace fsdpp::observe
