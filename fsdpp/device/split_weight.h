#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define FSDPP_HOST_DEVICE __host__ __device__
#else
#define FSDPP_HOST_DEVICE
#endif

namespace fsdpp::device {

/// An fp32 weight as the bf16 that is published and a remainder of 16 bits; no bit is lost.
///
/// As integers, bits(weight) = (model << 16) + remainder, remainder read as signed: [-32768, 32767]. So
/// `model` is the nearest bf16, with ties away from zero. To-nearest-even cannot be had: an even bf16 is the
/// nearest-even of 65,537 fp32 values (both ties belong to it), one more than 16 bits tell apart; the two
/// roundings differ for ties only, one weight in 131,072 of random ones, where both neighbours are equally
/// near. A carry goes into the exponent as it should; the largest finite values publish infinity, as
/// to-nearest-even does, and come back exactly. Infinities and zeros keep their sign, remainder 0. A NaN
/// becomes the quiet NaN of its sign.
struct SplitWeight {
  uint16_t model;      // bits of the bf16
  uint16_t remainder;  // two's complement
};

FSDPP_HOST_DEVICE constexpr SplitWeight split_bits(uint32_t bits) {
  if ((bits & 0x7fffffffU) > 0x7f800000U) return {static_cast<uint16_t>((bits >> 16 & 0x8000U) | 0x7fc0U), 0};
  return {static_cast<uint16_t>((bits + 0x8000U) >> 16), static_cast<uint16_t>(bits)};
}

FSDPP_HOST_DEVICE constexpr uint32_t join_bits(SplitWeight weight) {
  // The remainder's sign takes one off the upper half.
  return (static_cast<uint32_t>(weight.model) << 16) + weight.remainder - ((weight.remainder & 0x8000U) << 1);
}

/// On the host: the weight's pair, and back.
[[nodiscard]] constexpr SplitWeight split_weight(float weight) {
  return split_bits(std::bit_cast<uint32_t>(weight));
}
[[nodiscard]] constexpr float join_weight(SplitWeight weight) {
  return std::bit_cast<float>(join_bits(weight));
}

}  // namespace fsdpp::device
