// Peer memory, signals and groups with ranks as threads: what must hold for every backend.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/connect.h"
#include "tests/dist/gates.h"

namespace fsdpp::comm {
namespace {

using std::chrono::milliseconds;
using test::Clock;
using test::own_tid;
using test::since;
using test::until_asleep;

class RankCounts : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(CommThreads, RankCounts, testing::Range(1, 9));

TEST_P(RankCounts, MemoryIsAlignedZeroAndReachedByEveryPeer) {
  const int ranks = GetParam();
  run_thread_ranks(ranks, [&](PeerGroup& group) {
    EXPECT_EQ(group.ranks(), ranks);
    const auto memory = group.allocate(5000, "a test");
    EXPECT_EQ(memory->bytes(), 5000U);
    for (int peer = 0; peer < ranks; ++peer) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->peer(peer)) % 4096, 0U);
      EXPECT_EQ(std::count(memory->peer(peer), memory->peer(peer) + 5000, std::byte{0}), 5000);
    }
    EXPECT_THROW(static_cast<void>(memory->peer(ranks)), std::out_of_range);
    EXPECT_THROW(static_cast<void>(memory->peer(-1)), std::out_of_range);
    group.barrier();
    std::fill_n(memory->peer(group.rank()), 5000, std::byte(group.rank() + 1));
    group.barrier();
    for (int peer = 0; peer < ranks; ++peer) {
      EXPECT_EQ(std::count(memory->peer(peer), memory->peer(peer) + 5000, std::byte(peer + 1)), 5000);
    }
  });
}

TEST_P(RankCounts, BarriersLetNobodyThroughEarly) {
  const int ranks = GetParam();
  std::atomic<int> entered{0};
  run_thread_ranks(ranks, [&](PeerGroup& group) {
    for (int i = 1; i <= 300; ++i) {
      entered.fetch_add(1, std::memory_order_relaxed);
      group.barrier();
      const int seen = entered.load(std::memory_order_relaxed);
      ASSERT_GE(seen, i * ranks);
      ASSERT_LE(seen, i * ranks + ranks - 1);  // this rank has not entered the next one
    }
  });
}

TEST_P(RankCounts, ExchangesGiveEveryValueInRankOrderAndReuseTheMailbox) {
  const int ranks = GetParam();
  run_thread_ranks(ranks, [&](PeerGroup& group) {
    for (int i = 0; i < 200; ++i) {
      std::vector<double> mine(static_cast<size_t>(i % 7));
      for (size_t k = 0; k < mine.size(); ++k)
        mine[k] = 1000.0 * group.rank() + 10.0 * i + static_cast<double>(k);
      const std::vector<double> all = group.exchange(mine);
      ASSERT_EQ(all.size(), mine.size() * static_cast<size_t>(ranks));
      for (size_t k = 0; k < all.size(); ++k) {
        const auto peer = static_cast<double>(k / mine.size());
        ASSERT_EQ(all[k], 1000.0 * peer + 10.0 * i + static_cast<double>(k % mine.size()));
      }
    }
    const std::vector<double> most(PeerGroup::kMaxExchange, group.rank());
    EXPECT_EQ(group.exchange(most).size(), most.size() * static_cast<size_t>(ranks));
  });
}

TEST_P(RankCounts, WhatWasWrittenBeforeASignalIsSeenAfterTheWait) {
  const int ranks = GetParam();
  run_thread_ranks(ranks, [&](PeerGroup& group) {
    const auto memory = group.allocate(64 * sizeof(uint32_t), "a test");
    const auto board = group.signals({"ready", "read"}, "test");
    const auto numbers = [&](int rank) { return reinterpret_cast<uint32_t*>(memory->peer(rank)); };
    for (uint32_t i = 1; i <= 200; ++i) {
      std::fill_n(numbers(group.rank()), 64, i);  // plain writes: ThreadSanitizer checks the order too
      board->signal(0, i);
      for (int peer = 0; peer < ranks; ++peer) {
        board->wait(peer, 0, i);
        ASSERT_EQ(std::count(numbers(peer), numbers(peer) + 64, i), 64);
      }
      board->signal(1, i);
      for (int peer = 0; peer < ranks; ++peer) board->wait(peer, 1, i);
    }
  });
}

TEST(CommThreads, SumsAreAddedInRankOrder) {
  run_thread_ranks(4, [](PeerGroup& group) {
    constexpr std::array<double, 4> kValues = {1e16, 1.0, -1e16, 3.0};  // any other order gives other bits
    const auto rank = static_cast<size_t>(group.rank());
    const std::vector<double> total = group.sum(std::vector<double>{kValues[rank], 1.0 * group.rank()});
    ASSERT_EQ(total.size(), 2U);
    EXPECT_EQ(total[0], ((1e16 + 1.0) - 1e16) + 3.0);
    EXPECT_EQ(total[1], 6.0);
    EXPECT_TRUE(group.sum({}).empty());
  });
}

TEST(CommThreads, BoardsAndChannelsDoNotShareCounters) {
  run_thread_ranks(2, [](PeerGroup& group) {
    const auto first = group.signals({"a", "b"}, "first");
    const auto second = group.signals({"a", "b"}, "second");
    EXPECT_EQ(first->channels(), 2);
    first->signal(1, 1);
    first->signal(1, 2);
    second->signal(0, 1);
    group.barrier();
    const int peer = 1 - group.rank();
    EXPECT_EQ(first->value(peer, 0), 0U);
    EXPECT_EQ(first->value(peer, 1), 2U);
    EXPECT_EQ(second->value(peer, 0), 1U);
    EXPECT_EQ(second->value(peer, 1), 0U);
    first->wait(peer, 1, 1);  // already passed: returns at once
  });
}

TEST(CommThreads, MemoryOutlivesItsGroup) {
  std::shared_ptr<PeerMemory> kept;
  run_thread_ranks(2, [&](PeerGroup& group) {
    const auto memory = group.allocate(100, "a test");
    *memory->peer(group.rank()) = std::byte(7 + group.rank());
    group.barrier();
    if (group.rank() == 0) kept = memory;
  });
  EXPECT_EQ(*kept->peer(1), std::byte{8});
}

TEST(CommThreads, ASleepingWaiterIsWokenAtOnce) {
  constexpr uint32_t kRounds = 21;
  std::vector<milliseconds> took;
  std::array<std::atomic<long>, kRounds + 1> sleeper{};
  std::array<std::atomic<Clock::rep>, kRounds + 1> raised{};
  run_thread_ranks(2, [&](PeerGroup& group) {
    const auto board = group.signals({"ready"}, "test");
    for (uint32_t i = 1; i <= kRounds; ++i) {
      if (group.rank() == 0) {
        sleeper[i] = own_tid();
        board->wait(1, 0, i);
        took.push_back(since(Clock::time_point(Clock::duration(raised[i]))));
      } else {
        until_asleep(sleeper[i]);
        raised[i] = Clock::now().time_since_epoch().count();
        board->signal(0, i);
      }
    }
  });
  std::sort(took.begin(), took.end());
  EXPECT_LT(took[kRounds / 2], milliseconds(40)) << "a lost wake is only noticed after a slice of 100 ms";
}

}  // namespace
}  // namespace fsdpp::comm
