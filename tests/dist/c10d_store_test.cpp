// The store that c10d's groups share: it is there for as long as any rank may ask it.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "fsdpp/comm/c10d_store.h"
#include "fsdpp/comm/connect.h"
#include "tests/dist/gates.h"

namespace fsdpp::comm {
namespace {

using namespace std::chrono_literals;
using test::Clock;
using test::own_tid;
using test::since;
using test::until_asleep;

constexpr std::chrono::milliseconds kLong = 20s;  // no test waits for it

std::string asked(const C10dStore& store, const std::string& key) {
  const std::vector<uint8_t> bytes = store.part("test")->get(key);
  return {bytes.begin(), bytes.end()};
}

TEST(C10dStore, RanksReadWhatOthersWroteAndPartsAreApart) {
  run_thread_ranks(3, [](PeerGroup& group) {
    const C10dStore store(group);
    if (group.rank() == 1) store.part("test")->set("key", std::vector<uint8_t>{'y', 'e', 's'});
    EXPECT_EQ(asked(store, "key"), "yes");
    EXPECT_FALSE(store.part("other")->check({"key"}));
    const C10dStore second(group);
    EXPECT_FALSE(second.part("test")->check({"key"}));
  });
}

// Two parts of one name are two groups, which share a store.
TEST(C10dStore, EveryGroupHasAName) {
  std::mutex mutex;
  std::map<std::string, int> seen;
  run_thread_ranks(4, [&](PeerGroup& group) {
    const int side = group.rank() / 2;
    const auto half = group.part({2 * side, 2 * side + 1}, "half");
    for (PeerGroup* among : {&group, half.get(), half.get(), &group}) {
      const std::string name = new_c10d_name(*among);
      const std::lock_guard lock(mutex);
      ++seen[name];
    }
  });
  std::vector<int> counts;
  for (const auto& [name, count] : seen) counts.push_back(count);
  std::sort(counts.begin(), counts.end());
  EXPECT_EQ(counts, (std::vector<int>{2, 2, 2, 2, 4, 4})) << "each rank of a group knows it by the same name";
}

// What c10d's threads did a moment after a rank was asked to stop: a complaint of libtorch's about a lost
// connection.
TEST(C10dStore, TheRankThatServesItLeavesLast) {
  std::atomic<long> serving{0};  // its thread, once it is about to leave
  std::atomic<bool> left{false};
  run_thread_ranks(3, [&](PeerGroup& group) {
    auto store = std::make_unique<C10dStore>(group, kLong);
    store->part("test")->set("key", std::vector<uint8_t>{'y', 'e', 's'});
    group.barrier();
    if (group.rank() == 0) {
      serving = own_tid();
      store.reset();
      left = true;
      return;
    }
    until_asleep(serving);
    EXPECT_FALSE(left);
    EXPECT_TRUE(store->has_left(0));
    EXPECT_FALSE(store->has_left(group.rank()));
    EXPECT_EQ(asked(*store, "key"), "yes");
  });
  EXPECT_TRUE(left);
}

C10dStore* abandoned = nullptr;  // what it holds stays within reach: no leak

TEST(C10dStore, ItDoesNotWaitForRanksThatAreGoneNorForEver) {
  run_thread_ranks(2, [](PeerGroup& group) {
    if (group.rank() == 1) {
      abandoned = new C10dStore(group);  // never leaves: its thread ends
      return;
    }
    auto store = std::make_unique<C10dStore>(group, kLong);
    while (!group.trouble_with(1)) std::this_thread::yield();
    const auto begin = Clock::now();
    store.reset();
    EXPECT_LT(since(begin), kLong / 2);
  });
  EXPECT_NE(abandoned, nullptr);
  std::atomic<bool> left{false};
  run_thread_ranks(2, [&](PeerGroup& group) {
    auto store = std::make_unique<C10dStore>(group, 50ms);
    group.barrier();
    if (group.rank() == 1) {
      while (!left) std::this_thread::yield();
      return;
    }
    store.reset();
    left = true;
  });
}

TEST(C10dStore, ARankThatFailsByItselfWaitsForNobody) {
  std::atomic<bool> failed{false};
  run_thread_ranks(2, [&](PeerGroup& group) {
    auto store = std::make_unique<C10dStore>(group, kLong);
    group.barrier();
    if (group.rank() == 1) {
      while (!failed) std::this_thread::yield();
      EXPECT_TRUE(store->has_left(0));
      return;
    }
    const auto begin = Clock::now();
    try {
      const auto own = std::move(store);
      throw std::runtime_error("no room");
    } catch (const std::runtime_error&) {
      failed = true;
    }
    EXPECT_LT(since(begin), kLong / 2);
  });
}

// An interrupt goes by as an exception too, but every rank hears it and leaves.
TEST(C10dStore, WhenAllAreInterruptedTheRankThatServesItStillLeavesLast) {
  std::atomic<long> serving{0};
  std::atomic<bool> left{false};
  run_thread_ranks(2, [&](PeerGroup& group) {
    auto store = std::make_unique<C10dStore>(group, kLong);
    group.barrier();
    if (group.rank() == 1) {
      until_asleep(serving);
      EXPECT_FALSE(left);
      store.reset();
      return;
    }
    request_interrupt();
    try {
      const auto own = std::move(store);
      serving = own_tid();
      throw Interrupted("stopped");
    } catch (const Interrupted&) {
      left = true;
    }
  });
  request_interrupt(false);
  EXPECT_TRUE(left);
}

}  // namespace
}  // namespace fsdpp::comm
