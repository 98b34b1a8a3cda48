// Compiled with -ffp-contract=off: a product fused into a sum would round once instead of twice.
#include "fsdpp/device/rows.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/device/widen.h"

namespace fsdpp::device {
namespace {

float element_at(const void* from, int64_t i, Element element) {
  if (element == Element::fp32) return static_cast<const float*>(from)[i];
  const uint16_t bits = static_cast<const uint16_t*>(from)[i];
  return element == Element::fp16 ? from_fp16(bits) : from_bf16(bits);
}

// Where the row at a position among all ranks' ids lies.
struct Place {
  const void* gradients;
  int64_t row;
};

Place place_of(const RowGradients& gradients, int64_t position) {
  int rank = 0;
  while (rank + 1 < gradients.ranks && position >= gradients.counts[rank])
    position -= gradients.counts[rank++];
  return {gradients.gradients[rank], position};
}

// Sums of elements [first, first + sum.size()) of the row whose occurrences are `order`.
void sum_row(std::span<float> sum, std::span<const int64_t> order, const RowGradients& gradients,
             int64_t first) {
  for (std::size_t k = 0; k < order.size(); ++k) {
    const Place place = place_of(gradients, order[k]);
    const int64_t begin = place.row * gradients.dim + first;
    for (std::size_t i = 0; i < sum.size(); ++i) {
      const float value = element_at(place.gradients, begin + static_cast<int64_t>(i), gradients.element);
      sum[i] = k == 0 ? value : sum[i] + value;
    }
  }
}

}  // namespace

void gather_rows(void* out, std::span<const int64_t> ids, const RowTable& table) {
  const auto size = static_cast<int64_t>(element_size(table.element));
  auto* target = static_cast<std::byte*>(out);
  for (const int64_t id : ids) {
    require(id >= 0 && id < table.rows, "gather_rows: id ", id, "; expected 0 to ", table.rows - 1);
    int64_t element = id * table.dim;
    const int64_t end = element + table.dim;
    while (element < end) {
      const int64_t offset = element % table.shard_elements;
      const int64_t count = std::min(end - element, table.shard_elements - offset);
      const auto* const shard = static_cast<const std::byte*>(table.shards[element / table.shard_elements]);
      std::memcpy(target, shard + offset * size, static_cast<std::size_t>(count * size));
      target += count * size;
      element += count;
    }
  }
}

void add_rows(const RowSums& out, const SortedIds& ids, const RowGradients& gradients, float scale,
              bool add_to_out) {
  std::vector<float> sums(static_cast<std::size_t>(gradients.dim));
  for (int64_t begin = 0, end = 0; begin < ids.total; begin = end) {
    const int64_t id = ids.sorted[begin];
    while (end < ids.total && ids.sorted[end] == id) ++end;
    const int64_t row = id * gradients.dim;  // the row's first element in the flat table
    const int64_t first = std::max<int64_t>(0, out.begin - row);
    const int64_t last = std::min(gradients.dim, out.begin + out.count - row);
    if (first >= last) continue;
    const std::span<float> sum(sums.data(), static_cast<std::size_t>(last - first));
    sum_row(sum, {ids.order + begin, ids.order + end}, gradients, first);
    float* const target = out.sums + (row + first - out.begin);
    for (std::size_t i = 0; i < sum.size(); ++i) {
      const float scaled = scale * sum[i];
      target[i] = add_to_out ? target[i] + scaled : scaled;
    }
  }
}

}  // namespace fsdpp::device
