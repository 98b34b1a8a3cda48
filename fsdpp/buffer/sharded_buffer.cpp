#include "fsdpp/buffer/sharded_buffer.h"

#include <utility>

#include "fsdpp/base/error.h"

namespace fsdpp::buffer {

using layout::Placement;
using layout::Transition;

void require_transition(const ShardedBuffer& buffer, Placement to, Transition expected) {
  const Transition actual = layout::transition(buffer.placement(), to);
  require(actual == expected, "buffer ", buffer.name(), " is ", layout::to_string(buffer.placement()),
          "; going to ", layout::to_string(to), " is ", layout::to_string(actual), ", not ",
          layout::to_string(expected));
}

ShardedBuffer::ShardedBuffer(std::string name, std::shared_ptr<const layout::ShardLayout> layout,
                             Placement placement, int rank, device::Element element,
                             std::vector<std::byte*> parts)
    : name_(std::move(name)),
      layout_(std::move(layout)),
      placement_(placement),
      rank_(rank),
      element_(element),
      parts_(std::move(parts)) {
  require(static_cast<int>(parts_.size()) == layout_->ranks(), "buffer ", name_, ": ", parts_.size(),
          " parts given for a layout of ", layout_->ranks(), " ranks; give one part per rank");
  require(rank_ >= 0 && rank_ < layout_->ranks(), "buffer ", name_, ": rank ", rank_, " is not among ",
          layout_->ranks(), " ranks");
}

void gather(const Route& route, const ShardedBuffer& source, std::byte* full) {
  require_transition(source, Placement::replicate, Transition::gather);
  const auto bytes = static_cast<std::size_t>(source.shard_bytes());
  if (route.collectives != nullptr) {
    device::Access access{{}, {{full, static_cast<std::size_t>(source.full_bytes())}}};
    for (const layout::Segment& segment :
         source.layout().segments(source.rank())) {  // padding counts as nothing
      access.reads.push_back({source.local() + segment.shard_offset * source.element_bytes(),
                              static_cast<std::size_t>(segment.count * source.element_bytes())});
    }
    route.device.run(
        route.lane, "gather " + source.name(), std::move(access),
        [=, all = route.collectives, shard = source.local()] { all->all_gather(full, shard, bytes); });
    return;
  }
  // Each rank starts with its right neighbour, so that the ranks do not all read the same memory at once.
  std::vector<device::Copy> copies;
  for (int step = 1; step <= source.ranks(); ++step) {
    const int rank = (source.rank() + step) % source.ranks();
    std::byte* place = full + static_cast<std::size_t>(rank) * bytes;
    if (place == source.part(rank)) continue;  // its own shard is in place already
    copies.push_back({place, source.part(rank), bytes});
  }
  if (!copies.empty()) route.device.copy_all(route.lane, "gather " + source.name(), std::move(copies));
}

void slice(const Route& route, const ShardedBuffer& source, std::byte* shard) {
  require_transition(source, Placement::shard, Transition::slice);
  const auto bytes = static_cast<std::size_t>(source.shard_bytes());
  route.device.copy(route.lane, "slice " + source.name(), shard,
                    source.local() + static_cast<std::size_t>(source.rank()) * bytes, bytes);
}

}  // namespace fsdpp::buffer
