#pragma once

#include <cstdint>

namespace fsdpp::data {

/// A pseudo-random order of 0 .. size-1 that is computed, not stored.
///
/// A Feistel network over the smallest even number of bits that holds size-1, walked along its cycle until it
/// lands below `size` (Black, Rogaway: Ciphers with arbitrary finite domains, 2002). At most four rounds of
/// walking are expected per call. The order depends on `size` and `key` alone, on every machine.
class Permutation {
 public:
  /// Throws UsageError unless 1 <= size <= 2^62.
  Permutation(int64_t size, uint64_t key);

  /// The number at `position` of the order: a bijection of 0 .. size-1.
  /// Throws std::out_of_range unless 0 <= position < size().
  [[nodiscard]] int64_t operator()(int64_t position) const;
  [[nodiscard]] int64_t size() const noexcept { return size_; }

 private:
  [[nodiscard]] uint64_t encrypt(uint64_t value) const noexcept;

  int64_t size_;
  uint64_t key_;
  int half_bits_ = 1;
};

}  // namespace fsdpp::data
