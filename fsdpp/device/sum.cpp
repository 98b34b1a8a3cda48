// Compiled with -O3 -ffp-contract=off: the loops are for the vectoriser, and a product fused into a sum would
// round once instead of twice.
#include "fsdpp/device/sum.h"

#include <algorithm>
#include <array>

#include "fsdpp/device/widen.h"

namespace fsdpp::device {
namespace {

// 16 KiB of running fp32 sums stay in the first-level cache, so every source and `out` pass through memory
// once.
constexpr int64_t kBlock = 4096;

// How sources are stored, and as what they are added.
struct Fp32 {
  using Stored = float;
  using Sum = float;
  static float widen(float value) { return value; }
};
struct Bf16 {
  using Stored = uint16_t;
  using Sum = float;
  static float widen(uint16_t bits) { return from_bf16(bits); }
};
struct Fp16 {
  using Stored = uint16_t;
  using Sum = float;
  static float widen(uint16_t bits) { return from_fp16(bits); }
};
struct Fp64 {
  using Stored = double;
  using Sum = double;
  static double widen(double value) { return value; }
};
template <class Wire>
using Source = const typename Wire::Stored* __restrict;
template <class Wire>
using Sums = typename Wire::Sum* __restrict;

template <class Wire>
void set_sum(Sums<Wire> sum, Source<Wire> a, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] = Wire::widen(a[i]);
}

template <class Wire>
void set_sum(Sums<Wire> sum, Source<Wire> a, Source<Wire> b, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] = Wire::widen(a[i]) + Wire::widen(b[i]);
}

template <class Wire>
void add_one(Sums<Wire> sum, Source<Wire> a, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] += Wire::widen(a[i]);
}

// Two sources per pass over the sums; the order of the additions is that of one after the other.
template <class Wire>
void add_two(Sums<Wire> sum, Source<Wire> a, Source<Wire> b, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] = (sum[i] + Wire::widen(a[i])) + Wire::widen(b[i]);
}

template <class Sum>
void store(Sum* __restrict out, const Sum* __restrict sum, int64_t count, Sum scale, bool add) {
  if (add) {
    for (int64_t i = 0; i < count; ++i) out[i] += scale * sum[i];
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = scale * sum[i];
  }
}

template <class Wire, class Pointer>
void sum(typename Wire::Sum* out, std::span<const Pointer> sources, int64_t count, typename Wire::Sum scale,
         bool add_to_out) {
  using Sum = typename Wire::Sum;
  if (sources.empty()) {
    if (!add_to_out) std::fill_n(out, count, Sum{0});
    return;
  }
  alignas(64) std::array<Sum, kBlock> block;
  Sum* const sums = block.data();
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t size = std::min(kBlock, count - first);
    const auto from = [&](std::size_t source) {
      return static_cast<const typename Wire::Stored*>(sources[source]) + first;
    };
    std::size_t next = 2;
    if (sources.size() == 1) {
      set_sum<Wire>(sums, from(0), size);
    } else {
      set_sum<Wire>(sums, from(0), from(1), size);
    }
    for (; next + 1 < sources.size(); next += 2) add_two<Wire>(sums, from(next), from(next + 1), size);
    if (next < sources.size()) add_one<Wire>(sums, from(next), size);
    store(out + first, sums, size, scale, add_to_out);
  }
}

}  // namespace

void sum_in_rank_order(float* out, std::span<const float* const> sources, int64_t count, float scale,
                       bool add_to_out) {
  sum<Fp32>(out, sources, count, scale, add_to_out);
}

void sum_in_rank_order(void* out, std::span<const void* const> sources, Element wire, int64_t count,
                       double scale, bool add_to_out) {
  auto* const out32 = static_cast<float*>(out);
  const auto scale32 = static_cast<float>(scale);
  switch (wire) {
    case Element::fp32:
      return sum<Fp32>(out32, sources, count, scale32, add_to_out);
    case Element::bf16:
      return sum<Bf16>(out32, sources, count, scale32, add_to_out);
    case Element::fp16:
      return sum<Fp16>(out32, sources, count, scale32, add_to_out);
    case Element::fp64:
      return sum<Fp64>(static_cast<double*>(out), sources, count, scale, add_to_out);
  }
}

}  // namespace fsdpp::device
