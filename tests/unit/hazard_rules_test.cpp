// Reports about the order of ranks, states, counters and events, each beside the same schedule without the
// fault.
#include <gtest/gtest.h>

#include "tests/support/paper_ranks.h"

namespace fsdpp::test {
namespace {

using device::Event;
using device::LaneKind;
using device::State;
using trace::HazardKind;

const ByteRange kSlot = PaperRanks::bytes(0, 256);
const ByteRange kShard = PaperRanks::bytes(4096, 64);

TEST(HazardRules, ALaneIsNotRejoinedAtTheEndOfAStep) {
  const auto schedule = [](bool joined) {
    PaperRanks ranks(1);
    ranks[0].announce(LaneKind::reduce, "reduce a", writes(kShard));
    if (joined) ranks[0].wait(LaneKind::compute, ranks[0].record(LaneKind::reduce));
    ranks[0].rejoin(LaneKind::compute, "end of backward");
    return ranks.check();
  };
  expect_clean(schedule(true));
  expect_hazard(schedule(false), HazardKind::not_rejoined,
                {"rejoin end of backward of rank 0 must be behind reduce #1 run reduce a of rank 0"});
}

TEST(HazardRules, CollectivesThatDiffer) {
  const auto schedule = [](const std::string& kind, int64_t count, const std::string& dtype, int calls) {
    PaperRanks ranks(2);
    const auto call = [&](int rank, const std::string& what, int64_t elements, const std::string& type) {
      ranks[rank].collective(LaneKind::reduce, "collective", {"world", 2, what, elements, type}, {}, nullptr);
    };
    call(0, "all_gather", 8, "float");
    call(0, "reduce_scatter", 16, "float");
    call(1, "all_gather", 8, "float");
    if (calls == 2) call(1, kind, count, dtype);
    return ranks.check();
  };
  expect_clean(schedule("reduce_scatter", 16, "float", 2));
  expect_hazard(schedule("all_gather", 16, "float", 2), HazardKind::collective,
                {"is collective 2 of group world", "calls all_gather of 16 float",
                 "reduce #2 collective collective of rank 0 calls reduce_scatter of 16 float"});
  expect_hazard(schedule("reduce_scatter", 15, "float", 2), HazardKind::collective, {"15 float", "16 float"});
  expect_hazard(schedule("reduce_scatter", 16, "bfloat16", 2), HazardKind::collective, {"bfloat16"});
  expect_hazard(schedule("", 0, "", 1), HazardKind::collective,
                {"reduce #2 collective collective of rank 0 calls reduce_scatter in group world",
                 "only 1 of 2 ranks call: rank 0"});
}

TEST(HazardRules, ACollectiveOrdersTheRanks) {
  const auto schedule = [](bool behind) {
    PaperRanks ranks(2);
    const auto call = [&](int rank) {
      ranks[rank].collective(LaneKind::reduce, "sum", {"world", 2, "all_reduce", 8, "float"}, {}, nullptr);
    };
    if (!behind) call(0);
    ranks[0].announce(LaneKind::reduce, "write", writes(kSlot));
    if (behind) call(0);
    call(1);
    ranks[1].announce(LaneKind::reduce, "read", reads(kSlot));
    return ranks.check();
  };
  expect_clean(schedule(true));
  expect_hazard(schedule(false), HazardKind::unordered, {"of rank 1", "of rank 0"});
}

TEST(HazardRules, StatesFollowTheTable) {
  PaperRanks good(1);
  good[0].move("unit a", State::released, State::gathering);
  good[0].move("unit a", State::gathering, State::resident);
  good[0].move("unit a", State::resident, State::gathering);  // newer weights
  good[0].move("unit a", State::gathering, State::resident);
  good[0].move("unit a", State::resident, State::released);
  good[0].move("slot a", State::closed, State::open);
  good[0].move("slot a", State::open, State::reducing);
  good[0].move("slot a", State::reducing, State::closed);
  expect_clean(good.check());
  PaperRanks skipped(1);
  skipped[0].move("unit a", State::released, State::gathering);
  skipped[0].move("unit a", State::gathering, State::released);
  expect_hazard(skipped.check(), HazardKind::state,
                {"move unit a of rank 0 goes from gathering to released, which is not allowed"});
  PaperRanks torn(1);
  torn[0].move("slot a", State::closed, State::open);
  torn[0].move("slot a", State::reducing, State::closed);
  expect_hazard(torn.check(), HazardKind::state, {"leaves the state reducing but is in the state open"});
}

TEST(HazardRules, StatesAreKeptPerRank) {
  PaperRanks ranks(2);
  ranks[0].move("unit a", State::released, State::gathering);
  ranks[1].move("unit a", State::released, State::gathering);
  expect_clean(ranks.check());
}

TEST(HazardRules, ASignalThatNeverComes) {
  const auto schedule = [](uint32_t raised_to) {
    PaperRanks ranks(2);
    ranks[0].wait_signal(LaneKind::gather, "published a", 1, 3, 2, nullptr);
    ranks[1].signal(LaneKind::gather, "published a", 3, raised_to, nullptr);
    return ranks.check();
  };
  expect_clean(schedule(2));
  expect_hazard(
      schedule(1), HazardKind::signal,
      {"gather #1 wait_signal published a (rank 1, channel 3, sequence 2) of rank 0 waits for a signal that "
       "nothing raises"});
}

TEST(HazardRules, RanksThatWaitForEachOther) {
  PaperRanks ranks(2);
  for (int rank = 0; rank < 2; ++rank) {
    ranks[rank].wait_signal(LaneKind::reduce, "ready", 1 - rank, 0, 1, nullptr);
    ranks[rank].signal(LaneKind::reduce, "ready", 0, 1, nullptr);
  }
  const auto hazards = ranks.check();
  expect_hazard(hazards, HazardKind::signal, {"waits for a signal"});
  EXPECT_EQ(hazards.size(), 2U);
}

// comm/lanes.h: a device may wait until the peer's counter has reached its own, instead of a number.
TEST(HazardRules, OnesOwnCounterComesBeforeTheWaitForPeers) {
  const auto schedule = [](bool own_first) {
    PaperRanks ranks(2);
    for (int rank = 0; rank < 2; ++rank) {
      device::Device& device = ranks[rank];
      device.signal(LaneKind::reduce, "pulled a", 0, 1, nullptr);
      const Event pulled = device.record(LaneKind::reduce);
      if (own_first) device.wait(LaneKind::compute, pulled);
      device.wait_signal(LaneKind::compute, "pulled a", 1 - rank, 0, 1, nullptr);
      if (!own_first) device.wait(LaneKind::compute, pulled);
    }
    return ranks.check();
  };
  expect_clean(schedule(true));
  const auto hazards = schedule(false);
  expect_hazard(
      hazards, HazardKind::signal,
      {"wait_signal pulled a of rank 0 waits for rank 1 to raise channel 0 to 1 and must first wait for "
       "reduce #1 signal pulled a of rank 0"});
  EXPECT_EQ(hazards.size(), 2U);
}

TEST(HazardRules, OnesOwnCounterIsNotRaisedAfterTheWait) {
  PaperRanks ranks(2);
  ranks[0].signal(LaneKind::reduce, "ready a", 0, 1, nullptr);
  ranks[1].wait_signal(LaneKind::reduce, "ready a", 0, 0, 1, nullptr);  // alone: a channel of one direction
  expect_clean(ranks.check());
  ranks[1].signal(LaneKind::reduce, "ready a", 0, 1, nullptr);
  expect_hazard(
      ranks.check(), HazardKind::signal,
      {"reduce #2 signal ready a of rank 1 raises channel 0 to 1 after reduce #1 wait_signal ready a"});
}

TEST(HazardRules, CountersRiseInOrder) {
  const auto schedule = [](LaneKind second, uint32_t sequence) {
    PaperRanks ranks(1);
    ranks[0].signal(LaneKind::reduce, "pulled a", 3, 1, nullptr);
    ranks[0].signal(second, "pulled a", 3, sequence, nullptr);
    return ranks.check();
  };
  expect_clean(schedule(LaneKind::reduce, 2));
  expect_hazard(schedule(LaneKind::reduce, 1), HazardKind::signal, {"raises channel 3 to 1 after reduce #1"});
  expect_hazard(schedule(LaneKind::reduce, 3), HazardKind::signal, {"raised it to 1: expected 2"});
  expect_hazard(schedule(LaneKind::compute, 2), HazardKind::signal,
                {"compute #1 signal pulled a of rank 0 raises channel 3 to 2 and must wait for reduce #1"});
}

TEST(HazardRules, AWaitForAnEventThatWasNeverRecorded) {
  PaperRanks ranks(1);
  ranks[0].announce(LaneKind::compute, "work", {});
  ranks[0].wait(LaneKind::reduce, {LaneKind::compute, 1});
  expect_hazard(ranks.check(), HazardKind::event,
                {"reduce #1 wait of rank 0 waits for compute #1 of its rank"});
}

TEST(HazardRules, ATraceThatBeginsLateMayWaitForWhatCameBefore) {
  PaperRanks ranks(1);
  const Event before = ranks[0].record(LaneKind::compute);
  ranks[0].announce(LaneKind::compute, "work", {});
  ranks[0].wait(LaneKind::reduce, before);
  auto traces = ranks.traces();
  traces[0].erase(traces[0].begin());
  expect_clean(trace::check_traces(traces));
}

}  // namespace
}  // namespace fsdpp::test
