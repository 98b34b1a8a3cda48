#include "fsdpp/buffer/sharded_buffer.h"

#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/sum.h"

namespace fsdpp::buffer {
namespace {

using layout::Placement;
using layout::Transition;

void require_transition(const ShardedBuffer& buffer, Placement to, Transition expected) {
  const Transition actual = layout::transition(buffer.placement(), to);
  require(actual == expected, "buffer ", buffer.name(), " is ", layout::to_string(buffer.placement()),
          "; going to ", layout::to_string(to), " is ", layout::to_string(actual), ", not ",
          layout::to_string(expected));
}

// Pointers to the segment's first element in each contributor's part.
std::vector<const float*> sources_of(const ShardedBuffer& source, const layout::Segment& segment,
                                     std::span<const int> contributors) {
  const int64_t offset = source.rank() * source.layout().shard_numel() + segment.shard_offset;
  std::vector<const float*> sources;
  sources.reserve(contributors.size());
  for (const int rank : contributors)
    sources.push_back(reinterpret_cast<const float*>(source.part(rank)) + offset);
  return sources;
}

}  // namespace

ShardedBuffer::ShardedBuffer(std::string name, std::shared_ptr<const layout::ShardLayout> layout,
                             Placement placement, int rank, int64_t element_bytes,
                             std::vector<std::byte*> parts)
    : name_(std::move(name)),
      layout_(std::move(layout)),
      placement_(placement),
      rank_(rank),
      element_bytes_(element_bytes),
      parts_(std::move(parts)) {
  require(static_cast<int>(parts_.size()) == layout_->ranks(), "buffer ", name_, ": ", parts_.size(),
          " parts given for a layout of ", layout_->ranks(), " ranks; give one part per rank");
  require(rank_ >= 0 && rank_ < layout_->ranks(), "buffer ", name_, ": rank ", rank_, " is not among ",
          layout_->ranks(), " ranks");
}

void gather(device::Device& device, device::LaneKind lane, const ShardedBuffer& source, std::byte* full) {
  require_transition(source, Placement::replicate, Transition::gather);
  const auto bytes = static_cast<std::size_t>(source.shard_bytes());
  // Each rank starts with its right neighbour, so that the ranks do not all read the same memory at once.
  for (int step = 1; step <= source.ranks(); ++step) {
    const int rank = (source.rank() + step) % source.ranks();
    std::byte* place = full + static_cast<std::size_t>(rank) * bytes;
    if (place == source.part(rank)) continue;  // its own shard is in place already
    device.copy(lane, "gather " + source.name(), place, source.part(rank), bytes);
  }
}

void reduce(device::Device& device, device::LaneKind lane, const ShardedBuffer& source,
            std::span<const ReduceTarget> targets, std::span<const int> contributors, float scale) {
  require_transition(source, Placement::shard, Transition::reduce);
  require(source.element_bytes() == static_cast<int64_t>(sizeof(float)), "buffer ", source.name(),
          ": sums are fp32, elements of ", source.element_bytes(), " bytes cannot be reduced");
  for (const ReduceTarget& target : targets) {
    std::vector<const float*> sources = sources_of(source, target.segment, contributors);
    const auto bytes = static_cast<std::size_t>(target.segment.count) * sizeof(float);
    device::Access access;
    for (const float* pointer : sources) access.reads.push_back({pointer, bytes});
    access.writes.push_back({target.out, bytes});
    device.run(lane, "reduce " + source.name(), std::move(access),
               [target, scale, sources = std::move(sources)] {
                 comm::sum_in_rank_order(target.out, sources, target.segment.count, scale, target.add);
               });
  }
}

void slice(device::Device& device, device::LaneKind lane, const ShardedBuffer& source, std::byte* shard) {
  require_transition(source, Placement::shard, Transition::slice);
  const auto bytes = static_cast<std::size_t>(source.shard_bytes());
  device.copy(lane, "slice " + source.name(), shard,
              source.local() + static_cast<std::size_t>(source.rank()) * bytes, bytes);
}

}  // namespace fsdpp::buffer
