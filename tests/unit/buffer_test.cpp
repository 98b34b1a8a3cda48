#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/buffer/sharded_buffer.h"
#include "fsdpp/device/host.h"
#include "fsdpp/trace/recorder.h"

namespace fsdpp::buffer {
namespace {

using device::LaneKind;
using layout::Placement;

constexpr int kRanks = 3;

// Parts of all ranks of one buffer, in this process, filled with NaN: a read of padding shows.
struct Parts {
  Parts(std::shared_ptr<const layout::ShardLayout> given, Placement placement)
      : layout(std::move(given)),
        memory(kRanks, std::vector<float>(
                           static_cast<std::size_t>(placement == Placement::shard ? layout->shard_numel()
                                                                                  : layout->full_numel()),
                           std::numeric_limits<float>::quiet_NaN())) {}

  [[nodiscard]] ShardedBuffer seen_by(int rank, Placement placement) {
    std::vector<std::byte*> parts;
    for (auto& part : memory) parts.push_back(reinterpret_cast<std::byte*>(part.data()));
    return {"test", layout, placement, rank, device::Element::fp32, parts};
  }

  std::shared_ptr<const layout::ShardLayout> layout;
  std::vector<std::vector<float>> memory;
};

std::shared_ptr<const layout::ShardLayout> odd_layout() {
  return std::make_shared<const layout::ShardLayout>(
      layout::ShardLayout::flat({{"wide", {2, 333}}, {"bias", {5}}, {"scalar", {}}}, 4, kRanks));
}

// Values of a full buffer that differ everywhere; padding stays NaN.
void fill_parameters(const layout::ShardLayout& layout, float first, std::vector<float>& full) {
  for (int p = 0; p < static_cast<int>(layout.parameters().size()); ++p) {
    for (int64_t i = 0; i < layout.parameter_numel(p); ++i) {
      full[static_cast<std::size_t>(layout.parameter_offset(p) + i)] =
          first + static_cast<float>(p * 1000 + i);
    }
  }
}

TEST(ShardedBuffer, SliceThenGatherGivesTheWholeBack) {
  const auto layout = odd_layout();
  device::HostDevice device;
  Parts whole(layout, Placement::replicate);
  Parts shards(layout, Placement::shard);
  for (int rank = 0; rank < kRanks; ++rank) {
    fill_parameters(*layout, 7, whole.memory[static_cast<std::size_t>(rank)]);
    slice({device, LaneKind::gather}, whole.seen_by(rank, Placement::replicate),
          reinterpret_cast<std::byte*>(shards.memory[static_cast<std::size_t>(rank)].data()));
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    std::vector<float> full(static_cast<std::size_t>(layout->full_numel()), 0);
    gather({device, LaneKind::gather}, shards.seen_by(rank, Placement::shard),
           reinterpret_cast<std::byte*>(full.data()));
    for (int p = 0; p < 3; ++p) {
      for (int64_t i = 0; i < layout->parameter_numel(p); ++i) {
        ASSERT_EQ(full[static_cast<std::size_t>(layout->parameter_offset(p) + i)],
                  7 + static_cast<float>(p * 1000 + i));
      }
    }
  }
}

// Reduces rank `rank`'s shard into `out`, a shard of its own.
void reduce_shard(Parts& parts, int rank, std::vector<int> contributors, float scale, bool add,
                  std::vector<float>& out) {
  device::HostDevice device;
  std::vector<ReduceTarget> targets;
  for (const layout::Segment& segment : parts.layout->segments(rank)) {
    targets.push_back({segment, out.data() + segment.shard_offset, add});
  }
  reduce({device, LaneKind::reduce}, parts.seen_by(rank, Placement::partial), targets, contributors, scale);
}

TEST(ShardedBuffer, ReduceAddsTheContributorsInRankOrderAndNeverReadsPadding) {
  const auto layout = odd_layout();
  Parts parts(layout, Placement::partial);
  for (int rank = 0; rank < kRanks; ++rank) {
    fill_parameters(*layout, static_cast<float>(rank), parts.memory[static_cast<std::size_t>(rank)]);
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    std::vector<float> out(static_cast<std::size_t>(layout->shard_numel()), 100);
    reduce_shard(parts, rank, {0, 2}, 0.5F, true, out);
    for (const layout::Segment& segment : layout->segments(rank)) {
      for (int64_t i = 0; i < segment.count; ++i) {
        const auto value = static_cast<float>(segment.parameter * 1000 + segment.parameter_offset + i);
        ASSERT_EQ(out[static_cast<std::size_t>(segment.shard_offset + i)],
                  100 + 0.5F * (value + (value + 2)));
      }
    }
    for (const float value : out) ASSERT_FALSE(std::isnan(value));
  }
}

TEST(ShardedBuffer, ReduceWithoutContributorsGivesZerosOrLeavesWhatIsThere) {
  const auto layout = odd_layout();
  Parts parts(layout, Placement::partial);
  std::vector<float> out(static_cast<std::size_t>(layout->shard_numel()), 3);
  reduce_shard(parts, 1, {}, 1, true, out);
  EXPECT_EQ(out[0], 3);
  reduce_shard(parts, 1, {}, 1, false, out);
  EXPECT_EQ(out[0], 0);
}

TEST(ShardedBuffer, ReduceMayWriteOverItsOwnPart) {
  const auto layout = odd_layout();
  Parts parts(layout, Placement::partial);
  for (auto& part : parts.memory) fill_parameters(*layout, 1, part);
  device::HostDevice device;
  std::vector<ReduceTarget> targets;
  float* region = parts.memory[1].data() + layout->shard_numel();
  for (const layout::Segment& segment : layout->segments(1)) {
    targets.push_back({segment, region + segment.shard_offset, false});
  }
  const std::vector<int> all = {0, 1, 2};
  reduce({device, LaneKind::reduce}, parts.seen_by(1, Placement::partial), targets, all, 1);
  for (const layout::Segment& segment : layout->segments(1)) {
    const auto value = static_cast<float>(1 + segment.parameter * 1000 + segment.parameter_offset);
    EXPECT_EQ(region[segment.shard_offset], 3 * value);
  }
}

constexpr Placement kPlacements[] = {Placement::replicate, Placement::partial, Placement::shard};

// What `act` is refused with; empty: it was not.
template <class Act>
std::string refusal(const Act& act) {
  try {
    act();
  } catch (const UsageError& error) {
    return error.what();
  }
  return {};
}

void expect_names(const std::string& message, Placement from, Placement to) {
  for (const Placement side : {from, to})
    EXPECT_NE(message.find(layout::to_string(side)), std::string::npos)
        << "no " << layout::to_string(side) << " in: " << message;
}

TEST(ShardedBuffer, EveryOrderedPairOfPlacementsHasOneTransitionOrNoneAndSaysWhich) {
  using layout::Transition;
  Parts parts(odd_layout(), Placement::partial);
  int refused = 0;
  for (const Placement from : kPlacements) {
    for (const Placement to : kPlacements) {
      SCOPED_TRACE(layout::to_string(from) + " to " + layout::to_string(to));
      int accepted = 0;
      for (const Transition asked : {Transition::none, Transition::gather, Transition::reduce,
                                     Transition::all_reduce, Transition::slice}) {
        const std::string message = refusal([&] { require_transition(parts.seen_by(0, from), to, asked); });
        if (message.empty()) {
          ++accepted;
          EXPECT_EQ(asked, layout::transition(from, to));
        } else {
          expect_names(message, from, to);
        }
      }
      const bool illegal = to == Placement::partial && from != to;
      EXPECT_EQ(accepted, illegal ? 0 : 1);
      refused += accepted == 0 ? 1 : 0;
    }
  }
  EXPECT_EQ(refused, 2);
}

TEST(ShardedBuffer, ATransitionOfAnotherPlacementIsRefusedByName) {
  const auto layout = odd_layout();
  device::HostDevice device;
  const Route route{device, LaneKind::reduce};
  for (const Placement from : kPlacements) {
    Parts parts(layout, Placement::replicate);
    Parts others(layout, Placement::replicate);
    const ShardedBuffer source = parts.seen_by(1, from);
    const ShardedBuffer whole = others.seen_by(1, Placement::replicate);
    std::byte* out = whole.local();
    const auto expect = [&](Placement legal, Placement to, const std::string& message) {
      if (from == legal) {
        EXPECT_EQ(message, "");
      } else {
        EXPECT_NE(message.find("buffer test"), std::string::npos) << message;
        expect_names(message, from, to);
      }
    };
    expect(Placement::shard, Placement::replicate, refusal([&] { gather(route, source, out); }));
    expect(Placement::partial, Placement::shard, refusal([&] { reduce(route, source, {}, {}, 1); }));
    expect(Placement::partial, Placement::replicate,
           refusal([&] { all_reduce(route, source, whole, {}, 1, [] {}); }));
    expect(Placement::replicate, Placement::shard, refusal([&] { slice(route, source, out); }));
    // Its halves: into what is to be whole, out of what will be.
    expect(Placement::replicate, Placement::replicate, refusal([&] { collect_regions(route, source); }));
  }
}

TEST(ShardedBuffer, WhatCannotBeSummedThereIsRefusedByName) {
  struct NeverCalled final : comm::Collectives {
    void all_gather(void*, const void*, std::size_t) override { ADD_FAILURE(); }
    void reduce_scatter(float*, const float*, int64_t) override { ADD_FAILURE(); }
  } collectives;
  const auto layout = odd_layout();
  device::HostDevice device;
  Parts parts(layout, Placement::partial);
  std::vector<std::byte*> places(kRanks, reinterpret_cast<std::byte*>(parts.memory[0].data()));
  const auto seen = [&](Placement placement, device::Element element) {
    return ShardedBuffer("narrow", layout, placement, 0, element, places);
  };
  for (const device::Element element :
       {device::Element::bf16, device::Element::fp16, device::Element::fp64}) {
    const std::string by_collectives = refusal([&] {
      reduce({device, LaneKind::reduce, &collectives}, seen(Placement::partial, element), {}, {}, 1);
    });
    const std::string not_its_sum = refusal([&] {
      all_reduce(
          {device, LaneKind::reduce}, seen(Placement::partial, element),
          seen(Placement::replicate, element == device::Element::fp64 ? device::Element::fp32 : element), {},
          1, [] {});
    });
    for (const std::string& message : {by_collectives, not_its_sum}) {
      EXPECT_NE(message.find("buffer narrow"), std::string::npos) << message;
      EXPECT_NE(message.find(to_string(element)), std::string::npos) << message;
    }
  }
}

TEST(ShardedBuffer, ItsOperationsNameWhatTheyTouch) {
  const auto layout = odd_layout();
  device::HostDevice device;
  trace::Recorder recorder;
  device.observe(&recorder);
  Parts shards(layout, Placement::shard);
  std::vector<float> full(static_cast<std::size_t>(layout->full_numel()));
  gather({device, LaneKind::gather}, shards.seen_by(1, Placement::shard),
         reinterpret_cast<std::byte*>(full.data()));
  ASSERT_EQ(recorder.operations().size(), 1U);
  ASSERT_EQ(recorder.operations()[0].reads.size(), static_cast<std::size_t>(kRanks));
  EXPECT_EQ(recorder.operations()[0].reads[0].begin, shards.memory[2].data()) << "starts at its neighbour";
  EXPECT_EQ(recorder.operations()[0].writes[0].begin, full.data() + 2 * layout->shard_numel());
}

}  // namespace
}  // namespace fsdpp::buffer
