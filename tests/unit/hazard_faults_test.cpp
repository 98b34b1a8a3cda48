// Faults that sharded runtimes have had, rebuilt as schedules: each is found, and its mended form is clean.
#include <gtest/gtest.h>

#include "tests/support/paper_ranks.h"

namespace fsdpp::test {
namespace {

using device::Event;
using device::LaneKind;
using device::State;
using trace::HazardKind;

// Two places of the weight arena, and a third unit's, which lies over both.
const ByteRange kPlaceA = PaperRanks::bytes(0, 512);
const ByteRange kPlaceB = PaperRanks::bytes(512, 512);
const ByteRange kSlot = PaperRanks::bytes(4096, 1024);
const ByteRange kShard = PaperRanks::bytes(8192, 512);
const ByteRange kPublished = PaperRanks::bytes(16384, 512);

// One backward of a unit: its weight gradient, and the reduce that reads it. Returns the end of the reduce.
Event backward_and_reduce(device::Device& device) {
  device.acquire(LaneKind::compute, "slot block1", kSlot);
  device.announce(LaneKind::compute, "wgrad block1", writes(kSlot));
  device.wait(LaneKind::reduce, device.record(LaneKind::compute));
  device.announce(LaneKind::reduce, "reduce block1", {{kSlot}, {kShard}});
  return device.record(LaneKind::reduce);
}

TEST(KnownFaults, GradientBufferFreedOnAnotherLaneThanItsLastUser) {
  const auto schedule = [](LaneKind freed_on) {
    PaperRanks ranks(1);
    backward_and_reduce(ranks[0]);
    ranks[0].release(freed_on, "slot block1", kSlot);
    return ranks.check();
  };
  expect_clean(schedule(LaneKind::reduce));
  expect_hazard(
      schedule(LaneKind::compute), HazardKind::early_release,
      {"compute #4 release slot block1 of rank 0 must wait for reduce #2 run reduce block1 of rank 0"});
}

TEST(KnownFaults, PinnedHostMemoryReadBeforeItsCopyEnded) {
  const auto schedule = [](bool waits) {
    PaperRanks ranks(1);
    ranks[0].announce(LaneKind::compute, "norm of the gradients", writes(kShard));
    copy(ranks[0], LaneKind::compute, "norm to pinned memory", PaperRanks::bytes(32768, 4),
         PaperRanks::bytes(8192, 4));
    const Event copied = ranks[0].record(LaneKind::compute);
    if (waits) ranks[0].wait(LaneKind::host, copied);
    ranks[0].announce(LaneKind::host, "print the norm", reads(PaperRanks::bytes(32768, 4)));
    return ranks.check();
  };
  expect_clean(schedule(true));
  expect_hazard(
      schedule(false), HazardKind::host_early,
      {"host #1 run print the norm of rank 0 must wait for compute #2 copy norm to pinned memory of rank 0"});
}

TEST(KnownFaults, ReduceInputReusedWhileTheReduceReadsIt) {
  const auto schedule = [](bool waits) {
    PaperRanks ranks(2);
    for (int rank = 0; rank < 2; ++rank) {
      device::Device& device = ranks[rank];
      const ByteRange own = PaperRanks::bytes(4096 + 1024 * static_cast<std::size_t>(rank), 1024);
      const ByteRange peers = PaperRanks::bytes(4096 + 1024 * static_cast<std::size_t>(1 - rank), 512);
      device.announce(LaneKind::compute, "wgrad block2", writes(own));
      device.wait(LaneKind::reduce, device.record(LaneKind::compute));
      device.signal(LaneKind::reduce, "ready block2", 0, 1, nullptr);
      device.wait_signal(LaneKind::reduce, "ready block2", 1 - rank, 0, 1, nullptr);
      device.announce(LaneKind::reduce, "reduce block2", reads(peers));
      device.signal(LaneKind::reduce, "pulled block2", 1, 1, nullptr);
      device.wait(LaneKind::compute, device.record(LaneKind::reduce));
      if (waits) device.wait_signal(LaneKind::compute, "pulled block2", 1 - rank, 1, 1, nullptr);
      device.announce(LaneKind::compute, "wgrad block1", writes(own));
    }
    return ranks.check();
  };
  expect_clean(schedule(true));
  const auto hazards = schedule(false);
  expect_hazard(hazards, HazardKind::unordered, {"block2", "no wait or record orders them"});
  EXPECT_EQ(hazards.size(), 2U) << "one for each rank";
}

TEST(KnownFaults, FirstUnitOfTheBackwardDoesNotWaitForThePreparationOfItsSlot) {
  const auto schedule = [](bool waits) {
    PaperRanks ranks(1);
    ranks[0].acquire(LaneKind::reduce, "slot block3", kSlot);
    ranks[0].fill(LaneKind::reduce, "prepare block3", const_cast<void*>(kSlot.begin), 0, kSlot.size);
    const Event prepared = ranks[0].record(LaneKind::reduce);
    if (waits) ranks[0].wait(LaneKind::compute, prepared);
    ranks[0].announce(LaneKind::compute, "wgrad block3", {{kSlot}, {kSlot}});  // adds
    return ranks.check();
  };
  expect_clean(schedule(true));
  expect_hazard(
      schedule(false), HazardKind::unordered,
      {"compute #1 run wgrad block3 of rank 0 must wait for reduce #2 fill prepare block3 of rank 0"});
}

// Gathers `name` into `place`, as a prefetch does, and returns the event after it.
Event prefetch(device::Device& device, const std::string& name, ByteRange place) {
  device.move("unit " + name, State::released, State::gathering);
  device.acquire(LaneKind::gather, "weights of " + name, place);
  copy(device, LaneKind::gather, "gather " + name, place, kPublished);
  return device.record(LaneKind::gather);
}

// A backward goes from block3 to block2, whose weights are prefetched. The recompute of block3 is a forward:
// one that prefetches as forwards do asks for block4, whose place in the plan is block2's.
TEST(KnownFaults, PrefetchIssuedDuringRecompute) {
  const auto schedule = [](bool prefetches) {
    PaperRanks ranks(1);
    const Event third = prefetch(ranks[0], "block3", kPlaceA);
    const Event second = prefetch(ranks[0], "block2", kPlaceB);
    ranks[0].wait(LaneKind::compute, third);
    if (prefetches) prefetch(ranks[0], "block4", kPlaceB);
    ranks[0].announce(LaneKind::compute, "recompute block3", reads(kPlaceA));
    ranks[0].announce(LaneKind::compute, "backward block3", reads(kPlaceA));
    ranks[0].wait(LaneKind::compute, second);
    ranks[0].announce(LaneKind::compute, "backward block2", reads(kPlaceB));
    return ranks.check();
  };
  expect_clean(schedule(false));
  const auto hazards = schedule(true);
  ASSERT_FALSE(hazards.empty());
  EXPECT_EQ(hazards.front().kind, HazardKind::life) << hazards.front().text;
  EXPECT_NE(
      hazards.front().text.find("acquire weights of block4 of rank 0 begins a life inside one that has not "
                                "ended"),
      std::string::npos)
      << hazards.front().text;
  EXPECT_EQ(hazards.back().kind, HazardKind::unordered)
      << "block2's backward reads what block4's gather writes";
}

}  // namespace
}  // namespace fsdpp::test
