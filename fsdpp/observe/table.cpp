#include "fsdpp/observe/table.h"

#include <algorithm>
#include <cstddef>

#include "fsdpp/base/error.h"

namespace fsdpp::observe {
namespace {

constexpr size_t kGap = 2;  // spaces between columns

/// Characters on screen: UTF-8 continuation bytes take no place.
size_t width_of(const std::string& cell) {
  return static_cast<size_t>(
      std::count_if(cell.begin(), cell.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace

std::string with_commas(long long value) {
  std::string digits = std::to_string(value);
  const size_t first = value < 0 ? 1 : 0;
  for (size_t at = digits.size(); at > first + 3;) {
    at -= 3;
    digits.insert(at, ",");
  }
  return digits;
}

Table::Table(std::vector<std::string> header) {
  require(!header.empty(), "a table needs at least one column");
  rows_.push_back(std::move(header));
  rule();
}

void Table::row(std::vector<std::string> cells) {
  require(cells.size() == rows_.front().size(), "a row of ", cells.size(), " cells in a table of ",
          rows_.front().size(), " columns");
  rows_.push_back(std::move(cells));
}

void Table::rule() { rows_.emplace_back(); }

std::string Table::str(int indent) const {
  const size_t columns = rows_.front().size();
  std::vector<size_t> widths(columns, 0);
  for (const auto& cells : rows_) {
    for (size_t c = 0; c < cells.size(); ++c) widths[c] = std::max(widths[c], width_of(cells[c]));
  }
  size_t total = kGap * (columns - 1);
  for (const size_t width : widths) total += width;

  std::string out;
  for (const auto& cells : rows_) {
    out.append(static_cast<size_t>(indent), ' ');
    if (cells.empty()) out.append(total, '-');
    for (size_t c = 0; c < cells.size(); ++c) {
      const std::string padding(widths[c] - width_of(cells[c]), ' ');
      if (c > 0) out.append(kGap, ' ');
      if (c > 0) out += padding + cells[c];
      if (c == 0) out += cells[c] + (columns > 1 ? padding : "");
    }
    out += '\n';
  }
  return out;
}

}  // namespace fsdpp::observe
