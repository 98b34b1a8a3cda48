// The simulated lanes by themselves.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <vector>

#include "fsdpp/base/error.h"
#include "tests/sim/sim_training.h"
#include "tests/support/sim_ranks.h"

namespace fsdpp::test {
namespace {

using device::LaneKind;
using device::SimDevice;
using device::SimOptions;
using device::SimPolicy;
using device::SimWorld;

constexpr uint64_t kSeeds = 60;

std::string failure_of(int ranks, const std::function<void(comm::PeerGroup&, SimWorld&)>& body) {
  try {
    run_sim_ranks(ranks, {}, body);
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in: " << text;
}

TEST(SimDevice, RunsLaterAndInTheOrderOfALane) {
  for (uint64_t index = 0; index < kSeeds; ++index) {
    run_sim_ranks(1, nth_seed(index), [&](comm::PeerGroup&, SimWorld& world) {
      SimDevice lanes(world, 0);
      std::vector<int> ran;
      for (int i = 0; i < 5; ++i) lanes.run(LaneKind::gather, "number", {}, [&ran, i] { ran.push_back(i); });
      lanes.synchronize();
      EXPECT_EQ(ran, (std::vector<int>{0, 1, 2, 3, 4}));
    });
  }
}

// Without a wait both orders of two lanes happen; with one only the right one.
TEST(SimDevice, LanesMeetInEveryOrderThatNothingForbids) {
  for (const bool waits : {false, true}) {
    std::map<SimPolicy, std::map<int, int>> seen;
    for (uint64_t index = 0; index < kSeeds; ++index) {
      run_sim_ranks(1, nth_seed(index), [&](comm::PeerGroup&, SimWorld& world) {
        SimDevice lanes(world, 0);
        int value = 0;
        lanes.run(LaneKind::gather, "write", {}, [&] { value = 1; });
        if (waits) lanes.wait(LaneKind::compute, lanes.record(LaneKind::gather));
        int read = -1;
        lanes.run(LaneKind::compute, "read", {}, [&] { read = value; });
        lanes.synchronize();
        ++seen[world.options().policy][read];
      });
    }
    EXPECT_EQ(seen[SimPolicy::random].count(0), waits ? 0U : 1U);
    EXPECT_EQ(seen[SimPolicy::longest].count(0), waits ? 0U : 1U);
    EXPECT_EQ(seen[SimPolicy::starve].count(0), waits ? 0U : 1U);
  }
}

TEST(SimDevice, AHostWaitsForWhatItAskedFor) {
  for (uint64_t index = 0; index < kSeeds; ++index) {
    run_sim_ranks(1, nth_seed(index), [&](comm::PeerGroup&, SimWorld& world) {
      SimDevice lanes(world, 0);
      bool ran = false;
      lanes.run(LaneKind::reduce, "work", {}, [&] { ran = true; });
      lanes.wait(LaneKind::host, lanes.record(LaneKind::reduce));
      EXPECT_TRUE(ran);
    });
  }
}

TEST(SimDevice, ReleasedMemoryHoldsGarbage) {
  run_sim_ranks(1, {}, [&](comm::PeerGroup&, SimWorld& world) {
    SimDevice lanes(world, 0);
    const device::Memory memory = lanes.allocate(16, "values", nullptr);
    auto* const values = reinterpret_cast<float*>(memory.data());
    lanes.acquire(LaneKind::compute, "values", {values, 16});
    lanes.fill(LaneKind::compute, "zero", values, 0, 16);
    lanes.synchronize();
    EXPECT_EQ(values[3], 0.0F);
    float late = 0;
    lanes.release(LaneKind::compute, "values", {values, 16});
    lanes.run(LaneKind::compute, "late read", {}, [&] { late = values[3]; });
    lanes.acquire(LaneKind::compute, "values", {values, 16});
    lanes.synchronize();
    EXPECT_TRUE(std::isnan(late));
  });
}

// The lane comes to the copy long after the caller has used its memory for something else.
TEST(SimDevice, AnUploadsSourceIsTheCallersAgainAtOnce) {
  run_sim_ranks(1, {}, [&](comm::PeerGroup&, SimWorld& world) {
    SimDevice lanes(world, 0);
    const device::Memory memory = lanes.allocate(sizeof(float), "value", nullptr);
    float source = 3;
    lanes.upload(LaneKind::compute, "table", memory.data(), &source, sizeof(source));
    source = 4;
    lanes.synchronize();
    EXPECT_EQ(*reinterpret_cast<const float*>(memory.data()), 3.0F);
  });
}

TEST(SimDevice, StaysNear) {
  for (uint64_t index = 0; index < kSeeds; ++index) {
    run_sim_ranks(1, nth_seed(index), [&](comm::PeerGroup&, SimWorld& world) {
      SimDevice lanes(world, 0);
      int ran = 0;
      for (int i = 0; i < 20; ++i) {
        lanes.stay_near();
        EXPECT_LE(i - ran, world.units_ahead());
        lanes.run(LaneKind::compute, "unit", {}, [&] { ++ran; });
      }
      lanes.synchronize();
    });
  }
}

TEST(SimWorld, WhatCanNeverGoOnIsReported) {
  const std::string report = failure_of(2, [](comm::PeerGroup& group, SimWorld& world) {
    SimDevice lanes(world, group.rank());
    if (group.rank() == 0) {
      lanes.wait_signal(LaneKind::reduce, "ready of rank 1", 1, 3, 7, nullptr);
      lanes.run(LaneKind::reduce, "sum", {}, [] {});
      lanes.synchronize();
    }
    group.barrier();
  });
  expect_part(report, "nothing can run");
  expect_part(report, "rank 0: its host waits: host #3 wait (for reduce #3)");
  expect_part(
      report,
      "reduce #1 wait_signal ready of rank 1 (rank 1, channel 3, sequence 7), 2 operations behind it");
  expect_part(report, "rank 1: its host waits: for a peer: barrier");
}

TEST(SimWorld, ARankThatEndsEarlyIsNotWaitedForForEver) {
  const std::string report = failure_of(2, [](comm::PeerGroup& group, SimWorld&) {
    if (group.rank() == 0) group.barrier();
  });
  expect_part(report, "rank 1: its host has ended");
}

TEST(SimWorld, WhatAnOperationThrowsEndsTheRun) {
  const std::string report = failure_of(2, [](comm::PeerGroup& group, SimWorld& world) {
    SimDevice lanes(world, group.rank());
    if (group.rank() == 1)
      lanes.run(LaneKind::gather, "bad", {}, [] { throw std::runtime_error("no such shard"); });
    lanes.synchronize();
    group.barrier();
  });
  expect_part(report, "gather #1 run bad of rank 1 threw: no such shard");
}

TEST(SimWorld, WhatARankThrowsEndsTheRun) {
  EXPECT_THROW(run_sim_ranks(3, {},
                             [](comm::PeerGroup& group, SimWorld&) {
                               if (group.rank() == 1) throw std::out_of_range("a rank's own");
                               group.barrier();
                             }),
               std::out_of_range);
}

TEST(SimWorld, ASeedIsAnOrder) {
  const SimConfig config{.ranks = 3, .steps = 2};
  std::map<uint64_t, int> orders;
  for (uint64_t index = 0; index < 12; ++index) {
    uint64_t once = 0;
    uint64_t again = 0;
    (void)train_simulated(config, nth_seed(index), {}, &once);
    (void)train_simulated(config, nth_seed(index), {}, &again);
    EXPECT_EQ(once, again) << "seed " << index;
    ++orders[once];
  }
  EXPECT_EQ(orders.size(), 12U);
}

TEST(SimPolicies, HaveNames) {
  for (const SimPolicy policy : {SimPolicy::random, SimPolicy::starve, SimPolicy::longest})
    EXPECT_EQ(device::sim_policy_from(device::to_string(policy)), policy);
  EXPECT_THROW((void)device::sim_policy_from("fair"), UsageError);
}

}  // namespace
}  // namespace fsdpp::test
