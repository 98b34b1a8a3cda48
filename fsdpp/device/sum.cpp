// Compiled with -O3 -ffp-contract=off: the loops are for the vectoriser, and a product fused into a sum would
// round once instead of twice.
#include "fsdpp/device/sum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "fsdpp/base/error.h"

namespace fsdpp::device {
namespace {

// 16 KiB of running sums stay in the first-level cache, so every source and `out` pass through memory once.
constexpr int64_t kBlock = 4096;

// bf16 is the upper half of an fp32.
float widen(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
float widen(float value) { return value; }

template <class Number>
void set_sum(float* __restrict sum, const Number* __restrict a, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] = widen(a[i]);
}

template <class Number>
void set_sum(float* __restrict sum, const Number* __restrict a, const Number* __restrict b, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] = widen(a[i]) + widen(b[i]);
}

template <class Number>
void add_one(float* __restrict sum, const Number* __restrict a, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] += widen(a[i]);
}

// Two sources per pass over the sums; the order of the additions is that of one after the other.
template <class Number>
void add_two(float* __restrict sum, const Number* __restrict a, const Number* __restrict b, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] = (sum[i] + widen(a[i])) + widen(b[i]);
}

void store(float* __restrict out, const float* __restrict sum, int64_t count, float scale, bool add) {
  if (add) {
    for (int64_t i = 0; i < count; ++i) out[i] += scale * sum[i];
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = scale * sum[i];
  }
}

template <class Number>
void sum(float* out, std::span<const Number* const> sources, int64_t count, float scale, bool add_to_out) {
  if (sources.empty()) {
    if (!add_to_out) std::fill_n(out, count, 0.0F);
    return;
  }
  alignas(64) std::array<float, kBlock> block;
  float* const sums = block.data();
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t size = std::min(kBlock, count - first);
    std::size_t next = 2;
    if (sources.size() == 1) {
      set_sum(sums, sources[0] + first, size);
    } else {
      set_sum(sums, sources[0] + first, sources[1] + first, size);
    }
    for (; next + 1 < sources.size(); next += 2)
      add_two(sums, sources[next] + first, sources[next + 1] + first, size);
    if (next < sources.size()) add_one(sums, sources[next] + first, size);
    store(out + first, sums, size, scale, add_to_out);
  }
}

template <class Number>
std::vector<const Number*> as(std::span<const void* const> sources) {
  std::vector<const Number*> result;
  for (const void* source : sources) result.push_back(static_cast<const Number*>(source));
  return result;
}

}  // namespace

void sum_in_rank_order(float* out, std::span<const float* const> sources, int64_t count, float scale,
                       bool add_to_out) {
  sum(out, sources, count, scale, add_to_out);
}

void sum_in_rank_order(float* out, std::span<const void* const> sources, Element wire, int64_t count,
                       float scale, bool add_to_out) {
  FSDPP_INVARIANT(wire != Element::fp16, "sums of fp16 are not made");
  if (wire == Element::bf16) {
    sum(out, std::span<const uint16_t* const>(as<uint16_t>(sources)), count, scale, add_to_out);
  } else {
    sum(out, std::span<const float* const>(as<float>(sources)), count, scale, add_to_out);
  }
}

}  // namespace fsdpp::device
