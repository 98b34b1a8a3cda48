#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdpp/layout/shape.h"

namespace fsdpp::layout {

/// A run of elements of one parameter that lies in one rank's shard.
struct Segment {
  int parameter;             // index into the layout's parameter list
  int64_t parameter_offset;  // elements from the parameter's first
  int64_t shard_offset;      // elements from the shard's first
  int64_t count;             // elements, > 0
};

/// Where every element of a list of parameters lives, in the full buffer and in each rank's shard.
///
/// The full buffer is ranks() shards of equal size, one after another. Immutable once built; every rank
/// builds the same object from the same shapes.
class ShardLayout {
 public:
  /// Lays parameters end to end, big first (ties in list order), each starting 256-byte aligned, and cuts the
  /// whole evenly at 256-byte boundaries, also inside a row: one wide row does not cost `ranks` times its
  /// memory. `element_bytes`: 1, 2, 4 or 8. `ranks`: at least 1. Parameters without elements get no segment.
  /// Shards are padded so that each can be cut into `parts` (at least 1) by the same rule: the layout over
  /// ranks * parts ranks has the same places in the full buffer.
  /// Throws UsageError, naming the value, for illegal input or a total beyond int64 bytes.
  [[nodiscard]] static ShardLayout flat(std::vector<Shape> parameters, int64_t element_bytes, int ranks,
                                        int parts = 1);

  [[nodiscard]] int ranks() const noexcept;
  [[nodiscard]] int64_t element_bytes() const noexcept;
  [[nodiscard]] std::span<const Shape> parameters() const noexcept;

  /// Elements of the full buffer, padding included: ranks() * shard_numel().
  [[nodiscard]] int64_t full_numel() const noexcept;
  /// Elements of one shard, padding included; the same on every rank; a multiple of 256 bytes.
  [[nodiscard]] int64_t shard_numel() const noexcept;
  /// Elements of the full buffer that belong to no parameter.
  [[nodiscard]] int64_t padding_numel() const noexcept;

  /// First element of `parameter` in the full buffer (0 for one without elements).
  /// Throws std::out_of_range unless 0 <= parameter < parameters().size().
  [[nodiscard]] int64_t parameter_offset(int parameter) const;
  [[nodiscard]] int64_t parameter_numel(int parameter) const;

  /// Segments of `rank`'s shard in shard order; what they leave uncovered is padding.
  /// Throws std::out_of_range unless 0 <= rank < ranks().
  [[nodiscard]] std::span<const Segment> segments(int rank) const;

  /// Checks every promise above (no overlap, all covered, aligned, equal shards) and aborts when one is
  /// broken. Called by the builders.
  void check() const;

 private:
  ShardLayout() = default;

  std::vector<Shape> parameters_;
  std::vector<int64_t> offsets_;                // per parameter, elements into the full buffer
  std::vector<int64_t> numels_;                 // per parameter
  std::vector<std::vector<Segment>> segments_;  // per rank
  int64_t element_bytes_ = 0;
  int64_t shard_numel_ = 0;
  int64_t padding_numel_ = 0;
};

}  // namespace fsdpp::layout
