// Reports about memory and order, each on a schedule written by hand, each beside the same schedule without
// the fault.
#include <gtest/gtest.h>

#include "tests/support/paper_ranks.h"

namespace fsdpp::test {
namespace {

using device::Event;
using device::LaneKind;
using trace::HazardKind;

const ByteRange kSlot = PaperRanks::bytes(0, 256);

TEST(Hazards, UnorderedAccessesOfTwoLanes) {
  const auto schedule = [](bool ordered) {
    PaperRanks ranks(1);
    ranks[0].announce(LaneKind::compute, "wgrad a", writes(kSlot));
    const Event written = ranks[0].record(LaneKind::compute);
    if (ordered) ranks[0].wait(LaneKind::reduce, written);
    ranks[0].announce(LaneKind::reduce, "reduce a", reads(PaperRanks::bytes(64, 64)));
    return ranks.check();
  };
  expect_clean(schedule(true));
  expect_hazard(
      schedule(false), HazardKind::unordered,
      {"reduce #1 run reduce a of rank 0 must wait for compute #1 run wgrad a of rank 0",
       "no wait or record orders them", "the reduce lane of rank 0 knows the compute lane of rank 0 up to #0",
       "64 bytes at 0x10040"});
}

TEST(Hazards, AWriteThatDoesNotWaitForTheReaders) {
  const auto schedule = [](bool ordered) {
    PaperRanks ranks(1);
    ranks[0].announce(LaneKind::reduce, "read one", reads(kSlot));
    ranks[0].announce(LaneKind::gather, "read two", reads(kSlot));
    ranks[0].wait(LaneKind::compute, ranks[0].record(LaneKind::gather));
    if (ordered) ranks[0].wait(LaneKind::compute, ranks[0].record(LaneKind::reduce));
    ranks[0].announce(LaneKind::compute, "write", writes(PaperRanks::bytes(255, 1)));
    return ranks.check();
  };
  expect_clean(schedule(true));
  const auto hazards = schedule(false);
  expect_hazard(hazards, HazardKind::unordered, {"run write of rank 0 must wait for reduce #1 run read one"});
  EXPECT_EQ(hazards.size(), 1U);
}

TEST(Hazards, NeighbouringBytesAndTwoReadersDoNotConflict) {
  PaperRanks ranks(1);
  ranks[0].announce(LaneKind::compute, "write", writes(PaperRanks::bytes(0, 64)));
  ranks[0].announce(LaneKind::reduce, "write behind", writes(PaperRanks::bytes(64, 64)));
  ranks[0].announce(LaneKind::gather, "read", reads(PaperRanks::bytes(128, 64)));
  ranks[0].announce(LaneKind::compute, "read too", reads(PaperRanks::bytes(128, 64)));
  expect_clean(ranks.check());
}

TEST(Hazards, PeersAreOrderedBySignals) {
  const auto schedule = [](uint32_t waited_for, bool of_the_lane) {
    PaperRanks ranks(2);
    ranks[0].wait_signal(LaneKind::reduce, "ready a", 1, 7, waited_for, nullptr);
    ranks[0].announce(LaneKind::reduce, "pull a", reads(kSlot));
    ranks[1].announce(LaneKind::compute, "wgrad a", writes(PaperRanks::bytes(0, 8)));
    if (of_the_lane) ranks[1].wait(LaneKind::reduce, ranks[1].record(LaneKind::compute));
    ranks[1].signal(LaneKind::reduce, "ready a", 7, 1, nullptr);
    ranks[1].wait(LaneKind::reduce, ranks[1].record(LaneKind::compute));
    ranks[1].announce(LaneKind::compute, "wgrad a again", writes(PaperRanks::bytes(8, 8)));
    ranks[1].wait(LaneKind::reduce, ranks[1].record(LaneKind::compute));
    ranks[1].signal(LaneKind::reduce, "ready a", 7, 2, nullptr);
    return ranks.check();
  };
  expect_clean(schedule(2, true));
  expect_hazard(schedule(1, true), HazardKind::unordered,
                {"of rank 1", "reduce #2 run pull a of rank 0", "8 bytes at 0x10008"});
  EXPECT_EQ(schedule(1, false).size(), 2U) << "neither write is signalled";
}

TEST(Hazards, AnEventRecordedAnewStaysStaleForOldWaits) {
  const auto schedule = [](bool fresh) {
    PaperRanks ranks(1);
    const Event old = ranks[0].record(LaneKind::compute);
    ranks[0].announce(LaneKind::compute, "write", writes(kSlot));
    const Event anew = ranks[0].record(LaneKind::compute);
    ranks[0].wait(LaneKind::reduce, fresh ? anew : old);
    ranks[0].announce(LaneKind::reduce, "read", reads(kSlot));
    return ranks.check();
  };
  expect_clean(schedule(true));
  expect_hazard(schedule(false), HazardKind::unordered, {"run read of rank 0 must wait for"});
}

TEST(Hazards, OrderGoesOnFromLaneToLane) {
  PaperRanks ranks(3);
  ranks[0].announce(LaneKind::gather, "write", writes(kSlot));
  ranks[0].wait(LaneKind::compute, ranks[0].record(LaneKind::gather));
  ranks[0].signal(LaneKind::compute, "one", 0, 1, nullptr);
  ranks[1].wait_signal(LaneKind::reduce, "one", 0, 0, 1, nullptr);
  ranks[1].signal(LaneKind::reduce, "two", 1, 1, nullptr);
  ranks[2].wait_signal(LaneKind::gather, "two", 1, 1, 1, nullptr);
  ranks[2].announce(LaneKind::gather, "overwrite", writes(kSlot));
  expect_clean(ranks.check());
}

TEST(Hazards, MemoryReusedBeforeTheLastUseOfItsFormerLife) {
  const auto schedule = [](bool ordered) {
    PaperRanks ranks(1);
    ranks[0].acquire(LaneKind::gather, "weights a", kSlot);
    ranks[0].announce(LaneKind::gather, "gather a", writes(kSlot));
    ranks[0].wait(LaneKind::compute, ranks[0].record(LaneKind::gather));
    ranks[0].announce(LaneKind::compute, "forward a", reads(kSlot));
    ranks[0].release(LaneKind::compute, "weights a", kSlot);
    if (ordered) ranks[0].wait(LaneKind::gather, ranks[0].record(LaneKind::compute));
    ranks[0].acquire(LaneKind::gather, "weights b", PaperRanks::bytes(128, 256));
    return ranks.check();
  };
  expect_clean(schedule(true));
  expect_hazard(schedule(false), HazardKind::early_reuse,
                {"gather #4 acquire weights b of rank 0 must wait for compute #3 release weights a of rank 0",
                 "128 bytes at 0x10080"});
}

TEST(Hazards, MemoryReleasedBeforeItsLastUse) {
  const auto schedule = [](bool ordered) {
    PaperRanks ranks(1);
    ranks[0].acquire(LaneKind::compute, "slot a", kSlot);
    ranks[0].announce(LaneKind::compute, "wgrad a", writes(kSlot));
    ranks[0].wait(LaneKind::reduce, ranks[0].record(LaneKind::compute));
    ranks[0].announce(LaneKind::reduce, "reduce a", reads(kSlot));
    if (ordered) ranks[0].wait(LaneKind::compute, ranks[0].record(LaneKind::reduce));
    ranks[0].release(LaneKind::compute, "slot a", kSlot);
    return ranks.check();
  };
  expect_clean(schedule(true));
  expect_hazard(schedule(false), HazardKind::early_release,
                {"release slot a of rank 0 must wait for reduce #2 run reduce a of rank 0"});
}

TEST(Hazards, UseAfterRelease) {
  const auto schedule = [](bool used) {
    PaperRanks ranks(1);
    ranks[0].acquire(LaneKind::compute, "slot a", kSlot);
    ranks[0].announce(LaneKind::compute, "wgrad a", writes(kSlot));
    ranks[0].release(LaneKind::compute, "slot a", kSlot);
    if (used) ranks[0].announce(LaneKind::compute, "late", writes(PaperRanks::bytes(8, 8)));
    return ranks.check();
  };
  expect_clean(schedule(false));
  expect_hazard(
      schedule(true), HazardKind::use_after_release,
      {"compute #4 run late of rank 0 uses 8 bytes at 0x10008", "release slot a of rank 0 released before"});
}

TEST(Hazards, MemoryGivenBackToTheSystemWhileALaneUsesIt) {
  const auto schedule = [](bool waited) {
    PaperRanks ranks(2);
    ranks[0].announce(LaneKind::gather, "gather", writes(kSlot));
    const Event written = ranks[0].record(LaneKind::gather);
    if (waited) ranks[0].wait(LaneKind::host, written);
    ranks[0].free(LaneKind::host, "full weights", kSlot);
    // The system gives the bytes to another rank, which knows nothing of the first.
    ranks[1].announce(LaneKind::reduce, "sum", writes(kSlot));
    return ranks.check();
  };
  expect_clean(schedule(true));
  expect_hazard(schedule(false), HazardKind::early_release,
                {"host #1 free full weights of rank 0 must wait for gather #1 run gather of rank 0"});
}

TEST(Hazards, LivesBeginAndEndOnceAndWhole) {
  const auto schedule = [](bool first_ends, std::size_t bytes, int ends) {
    PaperRanks ranks(1);
    ranks[0].acquire(LaneKind::compute, "a", kSlot);
    if (first_ends) ranks[0].release(LaneKind::compute, "a", kSlot);
    ranks[0].acquire(LaneKind::compute, "b", kSlot);
    for (int end = 0; end < ends; ++end) {
      ranks[0].release(LaneKind::compute, "b", PaperRanks::bytes(0, bytes));
    }
    return ranks.check();
  };
  expect_clean(schedule(true, 256, 1));
  expect_hazard(
      schedule(false, 256, 1), HazardKind::life,
      {"acquire b of rank 0 begins a life inside one that has not ended", "see compute #1 acquire a"});
  expect_hazard(schedule(true, 128, 1), HazardKind::life, {"release b of rank 0 ends only a part of a life"});
  expect_hazard(schedule(true, 256, 2), HazardKind::life, {"release b of rank 0 ends a life a second time"});
  PaperRanks ranks(1);
  ranks[0].release(LaneKind::compute, "b", kSlot);
  expect_hazard(ranks.check(), HazardKind::life, {"release b of rank 0 ends a life that never began"});
}

TEST(Hazards, ReadBeforeAnyWrite) {
  const auto schedule = [](std::size_t written, bool as_copy) {
    PaperRanks ranks(1);
    ranks[0].acquire(LaneKind::compute, "slot a", kSlot);
    ranks[0].announce(LaneKind::compute, "wgrad a", writes(PaperRanks::bytes(0, written)));
    if (as_copy) {
      copy(ranks[0], LaneKind::compute, "move", PaperRanks::bytes(1024, 256), kSlot);
    } else {
      ranks[0].announce(LaneKind::compute, "reduce a", reads(kSlot));
    }
    return std::pair(ranks.check(), std::move(ranks));
  };
  expect_clean(schedule(256, false).first);
  expect_hazard(
      schedule(200, false).first, HazardKind::unwritten_read,
      {"run reduce a of rank 0 reads 56 bytes at 0x100c8 that nothing has written since compute #1 acquire "
       "slot a"});
  auto [hazards, ranks] = schedule(200, true);
  expect_clean(hazards);  // padding may be copied
  ranks[0].announce(LaneKind::compute, "use", reads(PaperRanks::bytes(1024, 200)));
  expect_clean(ranks.check());
  ranks[0].announce(LaneKind::compute, "use too much", reads(PaperRanks::bytes(1024, 201)));
  expect_hazard(ranks.check(), HazardKind::unwritten_read,
                {"use too much of rank 0 reads 1 bytes at 0x104c8"});
}

TEST(Hazards, ACopyMayHaveSeveralPairs) {
  std::vector<device::Operation> trace(3);
  trace[0] = {.kind = device::OperationKind::acquire, .lane = LaneKind::compute, .position = 1, .name = "a"};
  trace[0].writes = {kSlot};
  trace[1] = {
      .kind = device::OperationKind::copy, .lane = LaneKind::compute, .position = 2, .name = "gather"};
  for (const std::size_t first : {0, 128}) {
    trace[1].reads.push_back(PaperRanks::bytes(4096 + first, 128));
    trace[1].writes.push_back(PaperRanks::bytes(first, 128));
  }
  trace[2] = {.kind = device::OperationKind::run, .lane = LaneKind::compute, .position = 3, .name = "use"};
  trace[2].reads = {kSlot};
  expect_clean(trace::check_traces(std::vector<std::vector<device::Operation>>{trace}));
  trace[1].reads.pop_back();
  trace[1].writes.pop_back();
  expect_hazard(trace::check_traces(std::vector<std::vector<device::Operation>>{trace}),
                HazardKind::unwritten_read, {"128 bytes at 0x10080"});
}

TEST(Hazards, ANewLifeHasNothingWritten) {
  PaperRanks ranks(1);
  for (int life = 0; life < 2; ++life) {
    ranks[0].acquire(LaneKind::compute, "slot a", kSlot);
    if (life == 0) ranks[0].announce(LaneKind::compute, "wgrad a", writes(kSlot));
    ranks[0].announce(LaneKind::compute, "reduce a", reads(kSlot));
    ranks[0].release(LaneKind::compute, "slot a", kSlot);
  }
  expect_hazard(ranks.check(), HazardKind::unwritten_read,
                {"compute #6 run reduce a", "since compute #5 acquire"});
}

TEST(Hazards, TheHostReadsBeforeTheEvent) {
  const auto schedule = [](bool waited) {
    PaperRanks ranks(1);
    copy(ranks[0], LaneKind::gather, "to pinned", kSlot, PaperRanks::bytes(1024, 256));
    const Event copied = ranks[0].record(LaneKind::gather);
    if (waited) ranks[0].wait(LaneKind::host, copied);
    ranks[0].announce(LaneKind::host, "print", reads(kSlot));
    return ranks.check();
  };
  expect_clean(schedule(true));
  expect_hazard(schedule(false), HazardKind::host_early,
                {"host #1 run print of rank 0 must wait for gather #1 copy to pinned of rank 0"});
}

TEST(Hazards, WhatTheHostDidComesBeforeWhatItGivesToALane) {
  PaperRanks ranks(1);
  ranks[0].announce(LaneKind::host, "fill in", writes(kSlot));
  ranks[0].announce(LaneKind::compute, "use", reads(kSlot));
  ranks[0].wait(LaneKind::host, ranks[0].record(LaneKind::compute));
  ranks[0].announce(LaneKind::reduce, "overwrite", writes(kSlot));  // through the host's wait
  expect_clean(ranks.check());
}

TEST(Hazards, TheHostMustWaitBeforeItWritesWhatALaneReads) {
  PaperRanks ranks(1);
  ranks[0].announce(LaneKind::compute, "use", reads(kSlot));
  ranks[0].announce(LaneKind::host, "overwrite", writes(kSlot));
  expect_hazard(ranks.check(), HazardKind::host_early, {"host #1 run overwrite", "compute #1 run use"});
}

// The figures of a pair are told once however many pieces they share, and a flood of pairs is cut short.
TEST(Hazards, EachPairIsReportedOnce) {
  PaperRanks ranks(1);
  for (std::size_t piece = 0; piece < 4; ++piece) {
    ranks[0].announce(LaneKind::compute, "write", writes(PaperRanks::bytes(64 * piece, 64)));
  }
  ranks[0].announce(LaneKind::reduce, "read", reads(kSlot));
  EXPECT_EQ(ranks.check().size(), 4U);
  PaperRanks flood(1);
  flood[0].announce(LaneKind::compute, "write", writes(kSlot));
  for (int reader = 0; reader < 200; ++reader) flood[0].announce(LaneKind::reduce, "read", reads(kSlot));
  EXPECT_EQ(flood.check().size(), trace::HazardChecker::kMost);
}

}  // namespace
}  // namespace fsdpp::test
