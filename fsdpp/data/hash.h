#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace fsdpp::data {

/// A bijection of 64-bit words in which every input bit flips about half of the output bits: the finalizer of
/// splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
[[nodiscard]] constexpr uint64_t mix(uint64_t word) noexcept {
  word += 0x9e3779b97f4a7c15ULL;  // 2^64 / golden ratio
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ULL;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebULL;
  return word ^ (word >> 31);
}

/// Order-dependent hash of a series of words and strings; the same on every machine of one byte order.
class Hash {
 public:
  void add(uint64_t word) noexcept { state_ = mix(state_ ^ word); }

  /// Adds the length too, so that ("a", "bc") and ("ab", "c") differ.
  void add(std::string_view bytes) noexcept {
    add(static_cast<uint64_t>(bytes.size()));
    for (; !bytes.empty(); bytes.remove_prefix(bytes.size() < 8 ? bytes.size() : 8)) {
      uint64_t word = 0;
      std::memcpy(&word, bytes.data(), bytes.size() < 8 ? bytes.size() : 8);
      add(word);
    }
  }

  [[nodiscard]] uint64_t value() const noexcept { return state_; }

 private:
  uint64_t state_ = 0;
};

}  // namespace fsdpp::data
