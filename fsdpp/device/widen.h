#pragma once

#include <bit>
#include <cstdint>

namespace fsdpp::device {

/// The fp32 of a bf16's bits, which are its upper half.
[[nodiscard]] inline float from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

/// The fp32 of an fp16's bits; exact.
[[nodiscard]] inline float from_fp16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
  const uint32_t rest = bits & 0x7fffU;
  if (rest >= 0x7c00U)
    return std::bit_cast<float>(sign | 0x7f800000U | (rest & 0x3ffU) << 13);  // infinity, NaN
  if (rest >= 0x400U) return std::bit_cast<float>(sign | ((rest << 13) + (112U << 23)));
  const float small = static_cast<float>(rest) * 0x1p-24F;  // subnormal or zero: exact
  return sign != 0 ? -small : small;
}

}  // namespace fsdpp::device
