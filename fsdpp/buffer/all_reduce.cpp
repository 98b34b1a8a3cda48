#include <utility>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/buffer/sharded_buffer.h"

namespace fsdpp::buffer {
namespace {

using layout::Placement;
using layout::Transition;

std::byte* region(const ShardedBuffer& whole, int rank) {
  std::byte* part = whole.part(rank);  // null: a peer's, not addressable
  return part == nullptr ? nullptr : part + rank * whole.shard_bytes();
}

void require_whole(const ShardedBuffer& whole, const ShardedBuffer& source) {
  require(whole.element() == sum_element(source.element()) &&
              whole.layout().full_numel() == source.layout().full_numel(),
          "buffer ", source.name(), " of ", source.layout().full_numel(), " elements in ",
          to_string(source.element()), " cannot be all-reduced into ", whole.layout().full_numel(),
          " elements in ", to_string(whole.element()), "; expected as many in ",
          to_string(sum_element(source.element())));
}

}  // namespace

void sum_region(const Route& route, const ShardedBuffer& source, const ShardedBuffer& whole,
                std::span<const int> contributors, double scale) {
  require_transition(source, whole.placement(), Transition::all_reduce);
  require_whole(whole, source);
  reduce(route, source,
         whole_shard(source.layout(), source.rank(), region(whole, whole.rank()), whole.element()),
         contributors, scale);
}

void collect_regions(const Route& route, const ShardedBuffer& whole) {
  require(whole.placement() == Placement::replicate, "buffer ", whole.name(), " is ",
          layout::to_string(whole.placement()), ", but regions are collected where it becomes ",
          layout::to_string(Placement::replicate));
  std::vector<std::byte*> regions;
  for (int rank = 0; rank < whole.ranks(); ++rank) regions.push_back(region(whole, rank));
  gather(route,
         {whole.name(), whole.shared_layout(), Placement::shard, whole.rank(), whole.element(),
          std::move(regions)},
         whole.local());
}

void all_reduce(const Route& route, const ShardedBuffer& source, const ShardedBuffer& whole,
                std::span<const int> contributors, double scale, const std::function<void()>& meet) {
  sum_region(route, source, whole, contributors, scale);
  meet();
  collect_regions(route, whole);
}

}  // namespace fsdpp::buffer
