#include "fsdpp/layout/shape.h"

#include <algorithm>
#include <limits>

#include "fsdpp/base/error.h"

namespace fsdpp::layout {

int64_t numel(const Shape& shape) {
  for (const int64_t size : shape.sizes) {
    require(size >= 0, "parameter ", to_string(shape), " has the size ", size,
            "; expected sizes of 0 or more: pass the parameter's own sizes, without placeholders such as -1");
  }
  // A size of 0 makes the product 0 whatever the other sizes are, so it must not be mistaken for an overflow.
  if (std::find(shape.sizes.begin(), shape.sizes.end(), 0) != shape.sizes.end()) return 0;
  int64_t count = 1;
  for (const int64_t size : shape.sizes) {
    require(
        count <= std::numeric_limits<int64_t>::max() / size, "parameter ", to_string(shape),
        " has more elements than int64 can count; expected a product of sizes below 2^63: check its sizes");
    count *= size;
  }
  return count;
}

std::string to_string(const Shape& shape) {
  std::string out = shape.name + "[";
  const char* separator = "";
  for (const int64_t size : shape.sizes) {
    out += separator + std::to_string(size);
    separator = ", ";
  }
  return out + "]";
}

}  // namespace fsdpp::layout
