#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdpp::layout {

/// A parameter as the layout sees it: a name for messages, and sizes. No sizes: a scalar of one element.
struct Shape {
  std::string name;
  std::vector<int64_t> sizes;
};

/// Number of elements; 0 when a size is 0.
/// Throws UsageError, naming the parameter, for a negative size or a product beyond int64.
[[nodiscard]] int64_t numel(const Shape& shape);

/// "name[2, 3]", for messages.
[[nodiscard]] std::string to_string(const Shape& shape);

}  // namespace fsdpp::layout
