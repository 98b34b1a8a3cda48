#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace fsdpp::layout {

/// Time steps [first, last], both included, during which a buffer must keep its bytes.
struct Lifetime {
  int64_t first;
  int64_t last;
};

/// A buffer to place: it lives several times, always at the same offset.
struct PlannedBuffer {
  std::string name;                 // for messages and the printed plan
  int64_t bytes = 0;                // >= 0
  std::vector<Lifetime> lifetimes;  // each with first <= last; may be empty (never used: still placed)
};

/// Offsets in one arena for buffers with known lifetimes: two buffers whose lifetimes meet never share a
/// byte.
class ArenaPlan {
 public:
  /// Greedy by aligned size (largest first, ties in list order), each at the lowest free 256-byte aligned
  /// offset. Throws UsageError, naming the buffer, for negative bytes, a lifetime that ends before it begins,
  /// or a sum of all buffers beyond int64 bytes.
  [[nodiscard]] static ArenaPlan build(std::vector<PlannedBuffer> buffers);

  [[nodiscard]] std::span<const PlannedBuffer> buffers() const noexcept;
  /// Bytes from the arena's first; a multiple of 256. Throws std::out_of_range for an unknown index.
  [[nodiscard]] int64_t offset(int buffer) const;
  /// Bytes the arena needs; a multiple of 256.
  [[nodiscard]] int64_t bytes() const noexcept;
  /// The largest sum of (aligned) bytes alive at one time step: no plan can need less.
  [[nodiscard]] int64_t lower_bound_bytes() const noexcept;
  /// True when the bytes of the two buffers overlap. Throws std::out_of_range for an unknown index.
  [[nodiscard]] bool share_bytes(int a, int b) const;
  /// True when both give the same buffers (by number and bytes) the same offsets.
  [[nodiscard]] bool same_places(const ArenaPlan& other) const noexcept;
  /// Aborts when two buffers alive at one time share a byte. Called by build.
  void check() const;

 private:
  std::vector<PlannedBuffer> buffers_;
  std::vector<int64_t> offsets_;
  int64_t bytes_ = 0;
  int64_t lower_bound_bytes_ = 0;
};

}  // namespace fsdpp::layout
