#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
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
    return {"test", layout, placement, rank, 4, parts};
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

TEST(ShardedBuffer, IllegalTransitionsNameBothSides) {
  const auto layout = odd_layout();
  device::HostDevice device;
  Parts parts(layout, Placement::partial);
  std::vector<float> full(static_cast<std::size_t>(layout->full_numel()));
  auto* bytes = reinterpret_cast<std::byte*>(full.data());
  try {
    gather({device, LaneKind::gather}, parts.seen_by(0, Placement::partial), bytes);
    FAIL() << "gathered a partial buffer";
  } catch (const UsageError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("partial"), std::string::npos) << message;
    EXPECT_NE(message.find("replicate"), std::string::npos) << message;
  }
  EXPECT_THROW(slice({device, LaneKind::gather}, parts.seen_by(0, Placement::shard), bytes), UsageError);
  EXPECT_THROW(reduce({device, LaneKind::reduce}, parts.seen_by(0, Placement::replicate), {}, {}, 1),
               UsageError);
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
