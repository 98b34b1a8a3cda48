#pragma once

#include <cstddef>
#include <cstdint>

// What the sanitizers must be told, since they do not see inside libtorch: in TSan builds every lane
// operation announces the bytes it reads and writes, in ASan builds memory between its lives is poisoned.

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_read_range(void* address, long size);  // signed, as g++ knows them
extern "C" void __tsan_write_range(void* address, long size);
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace fsdpp::device {

/// Bytes of poisoned memory behind every planned buffer: an overrun is reported (ASan builds only).
#if defined(__SANITIZE_ADDRESS__)
inline constexpr int64_t kRedZone = 256;
#else
inline constexpr int64_t kRedZone = 0;
#endif

inline void announce_read([[maybe_unused]] const void* begin, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_THREAD__)
  __tsan_read_range(const_cast<void*>(begin), static_cast<long>(bytes));
#endif
}

inline void announce_write([[maybe_unused]] const void* begin, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_THREAD__)
  __tsan_write_range(const_cast<void*>(begin), static_cast<long>(bytes));
#endif
}

/// From here on any instrumented access to the bytes is reported (ASan builds only).
inline void poison([[maybe_unused]] const void* begin, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(begin, bytes);
#endif
}

inline void unpoison([[maybe_unused]] const void* begin, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(begin, bytes);
#endif
}

/// ASan's own view: true when the byte is poisoned. False in other builds.
[[nodiscard]] inline bool is_poisoned([[maybe_unused]] const void* address) {
#if defined(__SANITIZE_ADDRESS__)
  return __asan_address_is_poisoned(address) != 0;
#else
  return false;
#endif
}

}  // namespace fsdpp::device
