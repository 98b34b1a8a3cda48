#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fsdpp/comm/lanes.h"
#include "fsdpp/device/device.h"
#include "fsdpp/device/element.h"
#include "fsdpp/layout/placement.h"
#include "fsdpp/layout/shard_layout.h"

namespace fsdpp::buffer {

/// Values of a list of parameters, spread over the ranks of one group as `placement` says.
///
/// Built from a layout object, never by re-deriving one from shapes. Borrows its memory: every rank's part is
/// addressable here. Moving bytes is this folder's work; who may touch them when is the runtime's.
class ShardedBuffer {
 public:
  /// `parts[r]`: first byte of rank r's part: the whole (full_numel() elements) under replicate and partial,
  /// its shard (shard_numel()) under shard. Throws UsageError unless there is one part per rank of the
  /// layout.
  ShardedBuffer(std::string name, std::shared_ptr<const layout::ShardLayout> layout,
                layout::Placement placement, int rank, device::Element element,
                std::vector<std::byte*> parts);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const layout::ShardLayout& layout() const noexcept { return *layout_; }
  [[nodiscard]] const std::shared_ptr<const layout::ShardLayout>& shared_layout() const noexcept {
    return layout_;
  }
  [[nodiscard]] layout::Placement placement() const noexcept { return placement_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int ranks() const noexcept { return layout_->ranks(); }
  [[nodiscard]] device::Element element() const noexcept { return element_; }
  [[nodiscard]] int64_t element_bytes() const noexcept {
    return static_cast<int64_t>(device::element_size(element_));
  }
  [[nodiscard]] std::byte* part(int rank) const { return parts_.at(static_cast<std::size_t>(rank)); }
  [[nodiscard]] std::byte* local() const { return part(rank_); }
  [[nodiscard]] int64_t shard_bytes() const noexcept { return layout_->shard_numel() * element_bytes(); }
  [[nodiscard]] int64_t full_bytes() const noexcept { return layout_->full_numel() * element_bytes(); }

 private:
  std::string name_;
  std::shared_ptr<const layout::ShardLayout> layout_;
  layout::Placement placement_;
  int rank_;
  device::Element element_;
  std::vector<std::byte*> parts_;
};

/// Throws UsageError, naming both sides, unless going from `buffer`'s placement to `to` is `expected`.
void require_transition(const ShardedBuffer& buffer, layout::Placement to, layout::Transition expected);

/// What moves bytes between ranks, and on which lane.
struct Route {
  device::Device& device;
  device::LaneKind lane;
  comm::Collectives* collectives = nullptr;  // not null: peers' parts are not addressable, these carry them
  std::span<std::byte> staging = {};  // for peers' slices on a GPU, or (collectives) one whole shard, fp32
};

/// Where one segment of this rank's shard goes in a reduce.
struct ReduceTarget {
  layout::Segment segment;
  void* out;                // segment.count elements, stored as sum_element() of the buffer's
  bool add;                 // to what is there; else overwrite
  bool peers_only = false;  // this rank's own part of the segment holds nothing; unless added, the sum of the
                            // peers' is not scaled: whoever adds the own part to it does that
};

/// A reduce's targets when all of `rank`'s shard of `layout` goes to its place in the shard at `shard`, over
/// what is there. `sums`: how that is stored.
[[nodiscard]] std::vector<ReduceTarget> whole_shard(const layout::ShardLayout& layout, int rank, void* shard,
                                                    device::Element sums = device::Element::fp32);

/// Shard -> replicate: copies every rank's shard to its place in `full` (full_bytes() bytes). Peers' shards
/// must be valid and stay so until the lane has passed. Throws UsageError under another placement.
void gather(const Route& route, const ShardedBuffer& source, std::byte* full);

/// Partial -> shard. Each target gets scale * (the sum over `contributors`, in rank order), made and stored
/// as sum_element() of the buffer's. Ranks outside `contributors` hold no values and are not read; without
/// any, targets get zeros (or stay, with add). On the host padding is never read; a GPU pulls whole runs,
/// padding included, which lands between targets that lie as far apart as their segments. A target may be the
/// same memory as this rank's own part of the segment where elements are stored as their sums are.
/// Collectives sum in their own order, over all ranks, and fp32 alone. Throws UsageError under another
/// placement or element.
void reduce(const Route& route, const ShardedBuffer& source, std::span<const ReduceTarget> targets,
            std::span<const int> contributors, double scale);

/// Partial -> replicate, its first half: this rank's region of its part of `whole`, which is where its shard
/// lies in a full buffer, gets what reduce() gives. `whole` is replicate, in the same layout, its elements
/// sum_element() of the source's; where the source's are that too it may be the same memory.
/// Throws UsageError for another placement, element or number of elements.
void sum_region(const Route& route, const ShardedBuffer& source, const ShardedBuffer& whole,
                std::span<const int> contributors, double scale);
/// Its second half: copies the peers' regions to their places in this rank's part of `whole`. Between the
/// two, ranks meet: every peer's first half must have passed its lane, and what it summed must stay until
/// this has passed ours.
void collect_regions(const Route& route, const ShardedBuffer& whole);
/// Both. `meet` makes the route's lane go on behind every peer's first half.
void all_reduce(const Route& route, const ShardedBuffer& source, const ShardedBuffer& whole,
                std::span<const int> contributors, double scale, const std::function<void()>& meet);

/// Replicate -> shard: copies this rank's shard out of its whole to `shard` (shard_bytes() bytes). Throws
/// UsageError under another placement.
void slice(const Route& route, const ShardedBuffer& source, std::byte* shard);

}  // namespace fsdpp::buffer
