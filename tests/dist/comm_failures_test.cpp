// Groups of thread ranks when something goes wrong: who is named, how fast the others end, what they say.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <latch>
#include <string>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/comm/deadline.h"
#include "tests/dist/gates.h"

namespace fsdpp::comm {
namespace {

using std::chrono::milliseconds;
using test::Clock;
using test::expect_contains;
using test::own_tid;
using test::since;
using test::until_asleep;

constexpr milliseconds kLong(60000);  // never reached: a test that needs it fails by its own limit

TEST(CommThreadsDeathTest, ACallThatDoesNotComeBackEndsTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto call = [](bool comes_back) {
    const auto body = [&](PeerGroup& group) {
      const Deadline deadline(group, "a call", 3);
      std::promise<void> never;
      if (!comes_back) never.get_future().wait();
    };
    run_thread_ranks(1, body, milliseconds(100));
  };
  call(true);
  EXPECT_EXIT(call(false), testing::ExitedWithCode(3), "rank 0 of group .* did not come back from a call");
}

TEST(CommThreadsDeathTest, ASignalOutOfSequenceAborts) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto signal = [](uint32_t first, uint32_t second) {
    run_thread_ranks(1, [&](PeerGroup& group) {
      const auto board = group.signals({"ready"}, "test");
      board->signal(0, first);
      board->signal(0, second);
    });
  };
  signal(1, 2);
  EXPECT_DEATH(signal(1, 1), "signals 1 on channel \"test: ready\", which stands at 1");
  EXPECT_DEATH(signal(1, 3), "signals 3 on channel \"test: ready\", which stands at 1");
}

TEST(CommThreads, AMissingRankIsNamedOnceTheTimeoutIsOver) {
  constexpr milliseconds kTimeout(600);
  std::latch heard(2);
  const auto body = [&](PeerGroup& group) {
    const auto board = group.signals({"ready"}, "unit");
    board->signal(0, 1);
    for (int peer = 0; peer < 3; ++peer) board->wait(peer, 0, 1);
    if (group.rank() == 1) return heard.wait();  // lives, but never comes
    const auto start = Clock::now();
    try {
      board->wait(1, 0, 2);
      ADD_FAILURE() << "no rank was missed";
    } catch (const PeerError& error) {
      EXPECT_GE(since(start), kTimeout - milliseconds(5));
      EXPECT_LT(since(start), 10 * kTimeout);
      EXPECT_EQ(error.rank(), 1);
      EXPECT_EQ(error.group(), "threads");
      EXPECT_EQ(error.sequence(), 2U);
      for (const char* part : {"lost rank 1", "group \"threads\"", "channel \"unit: ready\"", "to reach 2",
                               "seen 1", "timeout 600 ms", "it runs but did not come in time"}) {
        expect_contains(error.what(), part);
      }
    }
    heard.count_down();
  };
  run_thread_ranks(3, body, kTimeout);
}

TEST(CommThreads, ARankMissingFromABarrierIsNamed) {
  std::latch heard(3);
  const auto body = [&](PeerGroup& group) {
    if (group.rank() == 2) return heard.wait();
    try {
      group.barrier();
      ADD_FAILURE() << "rank 2 was not missed";
    } catch (const PeerError& error) {
      EXPECT_EQ(error.rank(), 2);
      expect_contains(error.what(), "channel \"barrier\"");
    }
    heard.count_down();
  };
  run_thread_ranks(4, body, milliseconds(200));
}

TEST(CommThreads, AThrowingRankEndsTheOthersAtOnceAndIsTheOneReported) {
  const auto start = Clock::now();
  std::atomic<int> peers_failed{0};
  const auto body = [&](PeerGroup& group) {
    if (group.rank() == 2) throw std::out_of_range("boom");
    try {
      group.barrier();
    } catch (const PeerError& error) {
      EXPECT_EQ(error.rank(), 2);
      expect_contains(error.what(), "its thread has failed: boom");
      ++peers_failed;
      throw;
    }
  };
  EXPECT_THROW(run_thread_ranks(4, body, kLong), std::out_of_range);
  EXPECT_EQ(peers_failed, 3);
  EXPECT_LT(since(start), kLong / 4);
}

TEST(CommThreads, ARankThatThrowsBeforeAnAllocationEndsTheOthersAtOnce) {
  const auto start = Clock::now();
  const auto body = [&](PeerGroup& group) {
    if (group.rank() == 0) throw UsageError("bad value");
    static_cast<void>(group.allocate(64, "a test"));
  };
  EXPECT_THROW(run_thread_ranks(3, body, kLong), UsageError);
  EXPECT_LT(since(start), kLong / 4);
}

TEST(CommThreads, ARankThatReturnsEarlyIsSaidToHaveReturned) {
  const auto start = Clock::now();
  const auto body = [](PeerGroup& group) {
    if (group.rank() == 0) group.barrier();
  };
  try {
    run_thread_ranks(2, body, kLong);
    ADD_FAILURE() << "rank 1 was not missed";
  } catch (const PeerError& error) {
    EXPECT_EQ(error.rank(), 1);
    expect_contains(error.what(), "its thread has returned");
  }
  EXPECT_LT(since(start), kLong / 4);
}

TEST(CommThreads, ASignalOfARankThatHasSinceReturnedStillCounts) {
  std::latch gone(1);
  run_thread_ranks(2, [&](PeerGroup& group) {
    struct AtEnd {  // counted down once rank 1 is on its way out
      std::latch* latch;
      ~AtEnd() {
        if (latch != nullptr) latch->count_down();
      }
    } at_end{group.rank() == 1 ? &gone : nullptr};
    const auto board = group.signals({"ready"}, "test");
    if (group.rank() == 1) return board->signal(0, 1);
    gone.wait();
    board->wait(1, 0, 1);
  });
}

TEST(CommThreads, DifferentSizesAreAnErrorOnEveryRank) {
  std::atomic<int> refused{0};
  run_thread_ranks(3, [&](PeerGroup& group) {
    try {
      static_cast<void>(group.allocate(group.rank() == 2 ? 128 : 64, "part " + std::to_string(group.rank())));
    } catch (const UsageError& error) {
      expect_contains(error.what(), "rank 0 64 bytes for part 0, rank 2 128 bytes for part 2");
      ++refused;
    }
    group.barrier();  // the group still works
  });
  EXPECT_EQ(refused, 3);
}

TEST(CommThreads, DifferentOrTooManyExchangedValuesAreAnErrorOnEveryRank) {
  std::atomic<int> refused{0};
  run_thread_ranks(3, [&](PeerGroup& group) {
    const auto give = [&](size_t count, const std::string& part) {
      try {
        static_cast<void>(group.exchange(std::vector<double>(count)));
      } catch (const UsageError& error) {
        expect_contains(error.what(), part);
        ++refused;
      }
    };
    give(group.rank() == 1 ? 2 : 3, "different numbers of values");
    give(group.rank() == 1 ? PeerGroup::kMaxExchange + 1 : 3, "rank 1 gave 513 values");
    EXPECT_EQ(group.exchange(std::vector<double>{1.0}).size(), 3U);
  });
  EXPECT_EQ(refused, 6);
}

TEST(CommThreads, MoreMemoryThanThereIsIsAnErrorThatNamesIt) {
  run_thread_ranks(2, [](PeerGroup& group) {
    try {
      static_cast<void>(group.allocate(std::size_t{1} << 50, "gradient slots"));
      ADD_FAILURE() << "1 PiB was given";
    } catch (const EnvironmentError& error) {
      for (const char* part : {"gradient slots", "2 ranks", "bytes", "available", "use a smaller model"}) {
        expect_contains(error.what(), part);
      }
    }
    EXPECT_THROW(static_cast<void>(group.allocate(0, "nothing")), UsageError);
    EXPECT_THROW(static_cast<void>(group.allocate(SIZE_MAX, "all")), UsageError);
    EXPECT_THROW(static_cast<void>(group.signals({}, "none")), UsageError);
  });
}

TEST(CommThreads, GroupsOfNoRanksAreRefused) {
  EXPECT_THROW(run_thread_ranks(0, [](PeerGroup&) {}), UsageError);
  EXPECT_THROW(run_thread_ranks(-1, [](PeerGroup&) {}), UsageError);
}

TEST(CommThreads, AnInterruptEndsWaitsAndAllocations) {
  std::atomic<long> waiter{0};
  std::atomic<long> allocator{0};
  std::latch ended(2);
  const auto start = Clock::now();
  const auto body = [&](PeerGroup& group) {
    const auto board = group.signals({"ready"}, "unit");
    group.barrier();
    if (group.rank() == 2) {
      until_asleep(waiter);
      until_asleep(allocator);
      request_interrupt();
      return ended.wait();
    }
    try {
      if (group.rank() == 0) {
        waiter = own_tid();
        board->wait(2, 0, 1);
      } else {
        allocator = own_tid();
        static_cast<void>(group.allocate(64, "a late buffer"));
      }
      ADD_FAILURE() << "rank " << group.rank() << " was not interrupted";
    } catch (const Interrupted& error) {
      expect_contains(error.what(), group.rank() == 0
                                        ? "waited for rank 2 to reach 1 on channel \"unit: ready\""
                                        : "allocate a late buffer");
    }
    ended.count_down();
  };
  run_thread_ranks(3, body, kLong);
  request_interrupt(false);
  EXPECT_LT(since(start), kLong / 4);
}

}  // namespace
}  // namespace fsdpp::comm
