#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdpp {

/// Bytes [begin, begin + size) of this process's memory.
struct ByteRange {
  const void* begin = nullptr;
  std::size_t size = 0;  // bytes

  [[nodiscard]] uintptr_t first() const noexcept { return reinterpret_cast<uintptr_t>(begin); }
  [[nodiscard]] uintptr_t end() const noexcept { return first() + size; }
};

/// `bytes` (>= 0) from `begin` on.
[[nodiscard]] inline ByteRange bytes_at(const void* begin, int64_t bytes) noexcept {
  return {begin, static_cast<std::size_t>(bytes)};
}

/// True when the two share at least one byte.
[[nodiscard]] inline bool overlap(const ByteRange& a, const ByteRange& b) noexcept {
  return a.size > 0 && b.size > 0 && a.first() < b.end() && b.first() < a.end();
}

}  // namespace fsdpp
