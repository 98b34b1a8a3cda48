#include <algorithm>
#include <utility>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/buffer/sharded_buffer.h"

namespace fsdpp::buffer {
namespace {

using layout::Placement;
using layout::Transition;

int64_t bytes_of(device::Element element) { return static_cast<int64_t>(device::element_size(element)); }

std::byte* ahead(void* place, int64_t elements, device::Element sums) {
  return static_cast<std::byte*>(place) + elements * bytes_of(sums);
}

// Where this rank's shard begins in `rank`'s part, `shard_offset` elements on.
const std::byte* elements_of(const ShardedBuffer& source, int rank, int64_t shard_offset) {
  return source.part(rank) +
         (source.rank() * source.layout().shard_numel() + shard_offset) * source.element_bytes();
}

// One operation: the sum of `sources`, stored as `wire`, on the route's lane.
void sum(const Route& route, const std::string& name, void* out, std::vector<const void*> sources,
         device::Element wire, int64_t count, double scale, bool add) {
  device::Access access;
  for (const void* source : sources) access.reads.push_back(bytes_at(source, count * bytes_of(wire)));
  const ByteRange sums = bytes_at(out, count * bytes_of(sum_element(wire)));
  if (add) access.reads.push_back(sums);
  access.writes.push_back(sums);
  route.device.run(route.lane, name, std::move(access),
                   [=, kernels = &route.device.kernels(), sources = std::move(sources)] {
                     kernels->sum_in_rank_order(out, sources, wire, count, scale, add);
                   });
}

/// Targets that lie in memory as their segments lie in the shard: one run of the shard, gaps included.
struct Run {
  int64_t shard_offset;
  int64_t count;
  void* out;
  bool add;
  bool peers_only;
};

std::vector<int> sources_of(std::span<const int> contributors, int rank, bool peers_only) {
  std::vector<int> sources(contributors.begin(), contributors.end());
  if (peers_only) std::erase(sources, rank);
  return sources;
}

template <class Target>
double scale_of(const Target& target, double scale) {
  return target.peers_only && !target.add ? 1.0 : scale;
}

std::vector<Run> runs_of(std::span<const ReduceTarget> targets, const ShardedBuffer& source) {
  const device::Element sums = sum_element(source.element());
  std::vector<Run> runs;
  for (const ReduceTarget& target : targets) {
    const layout::Segment& segment = target.segment;
    if (!runs.empty()) {
      Run& last = runs.back();
      const int64_t distance = segment.shard_offset - last.shard_offset;
      if (target.add == last.add && target.peers_only == last.peers_only &&
          target.out == ahead(last.out, distance, sums)) {
        last.count = distance + segment.count;
        continue;
      }
    }
    runs.push_back({segment.shard_offset, segment.count, target.out, target.add, target.peers_only});
  }
  return runs;
}

// Peers' slices are pulled by the copy engine, beside the kernels of other lanes, and summed from near. What
// has one peer's slice only, and no own part in it, is there with the pull.
void pull_and_sum(const Route& route, const ShardedBuffer& source, const Run& run,
                  std::span<const int> all_contributors, double all_scale) {
  const std::string name = "reduce " + source.name();
  const std::string pull = "pull " + source.name();
  const double scale = scale_of(run, all_scale);
  const std::vector<int> contributors = sources_of(all_contributors, source.rank(), run.peers_only);
  const bool own_too =
      std::find(contributors.begin(), contributors.end(), source.rank()) != contributors.end();
  const std::byte* own = elements_of(source, source.rank(), run.shard_offset);
  const int64_t element = source.element_bytes();
  const device::Element sums = sum_element(source.element());
  // Slices that are stored as their sum is may be pulled to where it goes.
  const bool fits = source.element() == sums && !run.add;
  const bool pull_is_all = fits && run.peers_only && contributors.size() == 1;
  const bool straight = pull_is_all || (fits && own_too && contributors.size() == 2 && run.out != own);
  const auto peers = static_cast<int64_t>(source.ranks() - 1);
  const int64_t room =
      static_cast<int64_t>(route.staging.size()) / element / std::max<int64_t>(peers, 1) / 64 * 64;
  const int64_t most = straight || peers == 0 ? run.count : room;
  FSDPP_INVARIANT(most > 0, "no staging for the reduce of ", source.name());
  for (int64_t done = 0; done < run.count; done += most) {
    const int64_t count = std::min(most, run.count - done);
    std::byte* out = ahead(run.out, done, sums);
    std::byte* stage = route.staging.data();
    std::vector<const void*> sources;
    for (const int rank : contributors) {
      const std::byte* theirs = elements_of(source, rank, run.shard_offset + done);
      if (rank == source.rank()) {
        sources.push_back(theirs);
        continue;
      }
      std::byte* near = straight ? out : std::exchange(stage, stage + room * element);
      route.device.copy(route.lane, pull, near, theirs, static_cast<std::size_t>(count * element));
      sources.push_back(near);
    }
    if (pull_is_all) continue;
    sum(route, name, out, std::move(sources), source.element(), count, scale, run.add);
  }
}

// What counts of this rank's whole: padding is sent along, whatever it holds, and lands in padding.
std::vector<ByteRange> parameters_of(const ShardedBuffer& source) {
  std::vector<ByteRange> ranges;
  const layout::ShardLayout& layout = source.layout();
  for (int i = 0; i < static_cast<int>(layout.parameters().size()); ++i) {
    ranges.push_back(bytes_at(source.local() + layout.parameter_offset(i) * source.element_bytes(),
                              layout.parameter_numel(i) * source.element_bytes()));
  }
  return ranges;
}

void reduce_by_collectives(const Route& route, const ShardedBuffer& source, const std::vector<Run>& runs,
                           double scale) {
  constexpr auto kFp32 = device::Element::fp32;
  const int64_t shard = source.layout().shard_numel();
  const bool straight = runs.size() == 1 && !runs[0].add;
  auto* sums = reinterpret_cast<float*>(straight ? ahead(runs[0].out, -runs[0].shard_offset, kFp32)
                                                 : route.staging.data());
  FSDPP_INVARIANT(straight || static_cast<int64_t>(route.staging.size()) >= shard * bytes_of(kFp32),
                  "no staging for the reduce of ", source.name());
  const auto* full = reinterpret_cast<const float*>(source.local());
  device::Access access{parameters_of(source), {bytes_at(sums, source.shard_bytes())}};
  route.device.run(route.lane, "reduce " + source.name(), std::move(access),
                   [=, all = route.collectives] { all->reduce_scatter(sums, full, shard); });
  for (const Run& run : runs) {
    if (straight && scale == 1.0) continue;
    sum(route, "scale " + source.name(), run.out, {sums + run.shard_offset}, kFp32, run.count, scale,
        run.add);
  }
}

}  // namespace

std::vector<ReduceTarget> whole_shard(const layout::ShardLayout& layout, int rank, void* shard,
                                      device::Element sums) {
  std::vector<ReduceTarget> result;
  for (const layout::Segment& segment : layout.segments(rank))
    result.push_back({segment, ahead(shard, segment.shard_offset, sums), false});
  return result;
}

void reduce(const Route& route, const ShardedBuffer& source, std::span<const ReduceTarget> targets,
            std::span<const int> contributors, double scale) {
  require_transition(source, Placement::shard, Transition::reduce);
  require(route.collectives == nullptr || source.element() == device::Element::fp32, "buffer ", source.name(),
          " is ", to_string(source.element()),
          ": collectives sum fp32 alone; other elements where ranks read each other's memory");
  if (route.collectives != nullptr) {
    reduce_by_collectives(route, source, runs_of(targets, source), scale);
  } else if (route.device.gpu() >= 0) {
    for (const Run& run : runs_of(targets, source)) pull_and_sum(route, source, run, contributors, scale);
  } else {
    for (const ReduceTarget& target : targets) {
      std::vector<const void*> sources;
      for (const int rank : sources_of(contributors, source.rank(), target.peers_only))
        sources.push_back(elements_of(source, rank, target.segment.shard_offset));
      sum(route, "reduce " + source.name(), target.out, std::move(sources), source.element(),
          target.segment.count, scale_of(target, scale), target.add);
    }
  }
}

}  // namespace fsdpp::buffer
