// Compiled with -O3 -ffp-contract=off: the loops are for the vectoriser, and a product fused into a sum would
// round once instead of twice.
#include "fsdpp/device/sum.h"

#include <algorithm>
#include <array>

namespace fsdpp::device {
namespace {

// 16 KiB of running sums stay in the first-level cache, so every source and `out` pass through memory once.
constexpr int64_t kBlock = 4096;

void set_sum(float* __restrict sum, const float* __restrict a, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] = a[i];
}

void set_sum(float* __restrict sum, const float* __restrict a, const float* __restrict b, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] = a[i] + b[i];
}

void add_one(float* __restrict sum, const float* __restrict a, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] += a[i];
}

// Two sources per pass over the sums; the order of the additions is that of one after the other.
void add_two(float* __restrict sum, const float* __restrict a, const float* __restrict b, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] = (sum[i] + a[i]) + b[i];
}

void store(float* __restrict out, const float* __restrict sum, int64_t count, float scale, bool add) {
  if (add) {
    for (int64_t i = 0; i < count; ++i) out[i] += scale * sum[i];
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = scale * sum[i];
  }
}

}  // namespace

void sum_in_rank_order(float* out, std::span<const float* const> sources, int64_t count, float scale,
                       bool add_to_out) {
  if (sources.empty()) {
    if (!add_to_out) std::fill_n(out, count, 0.0F);
    return;
  }
  alignas(64) std::array<float, kBlock> sums;
  float* const sum = sums.data();
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t size = std::min(kBlock, count - first);
    std::size_t next = 2;
    if (sources.size() == 1) {
      set_sum(sum, sources[0] + first, size);
    } else {
      set_sum(sum, sources[0] + first, sources[1] + first, size);
    }
    for (; next + 1 < sources.size(); next += 2)
      add_two(sum, sources[next] + first, sources[next + 1] + first, size);
    if (next < sources.size()) add_one(sum, sources[next] + first, size);
    store(out + first, sum, size, scale, add_to_out);
  }
}

}  // namespace fsdpp::device
