#pragma once

#include <cstdint>
#include <string>

namespace fsdpp {

/// Every parameter and every shard starts at a multiple of this many bytes (design: layout).
inline constexpr int64_t kAlignment = 256;

/// `value` rounded up to a multiple of `unit` (both >= 0, unit > 0).
[[nodiscard]] constexpr int64_t round_up(int64_t value, int64_t unit) noexcept {
  return (value + unit - 1) / unit * unit;
}

/// Bytes for people, in binary units: "1.50 MiB".
[[nodiscard]] std::string human_bytes(int64_t bytes);

}  // namespace fsdpp
