// Lanes that talk through a c10d backend: contiguous shards, typed failures.
#include <gtest/gtest.h>

#include <future>
#include <numeric>
#include <string>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/c10d_collectives.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/comm/mesh_group.h"
#include "tests/dist/gates.h"
#include "tests/support/thread_c10d.h"

namespace fsdpp::comm {
namespace {

using test::expect_contains;
using test::ThreadC10d;

TEST(C10d, ShardsAreGatheredAndSummedAlsoInTheirPlaces) {
  for (const int ranks : {1, 2, 3}) {
    run_thread_ranks(ranks, [ranks](PeerGroup& group) {
      const auto backend = ThreadC10d::over(group);
      use_c10d(group, backend);
      Collectives& collectives = *group.lanes().collectives();
      constexpr int64_t kCount = 5;
      std::vector<float> full(static_cast<std::size_t>(ranks * kCount));
      std::iota(full.begin(), full.end(), static_cast<float>(100 * group.rank()));
      float* own = full.data() + group.rank() * kCount;
      std::vector<float> apart(kCount);
      collectives.reduce_scatter(apart.data(), full.data(), kCount);
      collectives.reduce_scatter(own, full.data(), kCount);
      const auto sum = [&](int64_t i) {  // of what rank 0, 1, ... had there
        return static_cast<float>(static_cast<int>(i) * ranks + 100 * ranks * (ranks - 1) / 2);
      };
      for (int64_t i = 0; i < kCount; ++i) {
        EXPECT_EQ(apart[static_cast<std::size_t>(i)], sum(group.rank() * kCount + i));
        EXPECT_EQ(own[i], sum(group.rank() * kCount + i));
      }
      std::vector<float> gathered(full.size());
      collectives.all_gather(gathered.data(), apart.data(), kCount * sizeof(float));
      collectives.all_gather(full.data(), own, kCount * sizeof(float));
      for (int64_t i = 0; i < ranks * kCount; ++i) EXPECT_EQ(gathered[static_cast<std::size_t>(i)], sum(i));
      EXPECT_EQ(full, gathered);
      EXPECT_EQ(backend->calls(), (ThreadC10d::Calls{2, 2}));
    });
  }
}

TEST(C10d, AnAxisTalksThroughItAndTheOthersDoNot) {
  run_thread_ranks(4, [](PeerGroup& whole) {
    const MeshGroup mesh(whole, hybrid_mesh(4, 2));
    PeerGroup& replicate = mesh.along("replicate");
    use_c10d(replicate, ThreadC10d::over(replicate));
    EXPECT_NE(replicate.lanes().collectives(), nullptr);
    EXPECT_EQ(mesh.along("shard").lanes().collectives(), nullptr);
    EXPECT_EQ(whole.lanes().collectives(), nullptr);
    EXPECT_EQ(replicate.lanes().describe(), "c10d's threads");
    EXPECT_EQ(replicate.lanes().gpu(), -1);
    const auto memory = replicate.lanes().allocate(64, "a test");
    for (int peer = 0; peer < 2; ++peer)
      EXPECT_EQ(memory->peer(peer) != nullptr, peer == replicate.rank()) << "nobody else's is addressable";
    replicate.barrier();  // the hosts meet as before
  });
}

// What rank 1's first call throws when it fails as `how`, beside a rank that is well.
std::string failure(ThreadC10d::Failure how) {
  std::string message;
  std::promise<void> over;
  run_thread_ranks(
      2,
      [&](PeerGroup& group) {
        const auto backend = ThreadC10d::over(group);
        use_c10d(group, backend);
        if (group.rank() == 1) {
          backend->fail(how);
          std::vector<float> full(2);
          try {
            group.lanes().collectives()->reduce_scatter(full.data(), full.data(), 1);
          } catch (const PeerError& error) {
            ADD_FAILURE() << "nobody is lost: " << error.what();
          } catch (const EnvironmentError& error) {
            message = error.what();
          }
          over.set_value();
        } else {
          over.get_future().wait();
        }
      },
      std::chrono::milliseconds(300));
  return message;
}

TEST(C10d, AFailureNamesTheCallTheRankTheGroupAndWhy) {
  using Failure = ThreadC10d::Failure;
  const std::string where = "reduce_scatter 1 of rank 1 of group \"threads\" through c10d's threads failed: ";
  expect_contains(failure(Failure::throws), where + "the cable is cut");
  expect_contains(failure(Failure::in_work), where + "the link is down");
  expect_contains(failure(Failure::aborted), where + "it was aborted");
  expect_contains(failure(Failure::never_done), where);  // c10d's own words for a timeout
}

TEST(C10d, ALostRankIsNamed) {
  std::string message;
  EXPECT_THROW(run_thread_ranks(4,
                                [&](PeerGroup& whole) {
                                  const MeshGroup mesh(whole, hybrid_mesh(4, 2));
                                  PeerGroup& group = mesh.along("replicate");
                                  use_c10d(group, ThreadC10d::over(group, std::chrono::milliseconds(500)));
                                  if (whole.rank() == 3) throw std::runtime_error("gone");
                                  if (whole.rank() != 1) return;
                                  float value = 0;
                                  std::vector<float> full(2);
                                  try {
                                    group.lanes().collectives()->all_gather(full.data(), &value,
                                                                            sizeof(value));
                                  } catch (const PeerError& error) {
                                    EXPECT_EQ(error.rank(), 3);
                                    EXPECT_EQ(error.group(), "threads/replicate");
                                    EXPECT_EQ(error.sequence(), 1U);
                                    message = error.what();
                                  }
                                }),
               std::runtime_error);
  expect_contains(message, "lost rank 3: its thread has failed: gone");
  expect_contains(message, "all_gather 1 of rank 1 of group \"threads/replicate\"");
  expect_contains(message, "timed out after 500 ms");
}

TEST(C10d, ABackendOfOtherRanksIsRefused) {
  run_thread_ranks(4, [](PeerGroup& whole) {
    const MeshGroup mesh(whole, hybrid_mesh(4, 2));
    const auto backend = ThreadC10d::over(whole);
    try {
      use_c10d(mesh.along("replicate"), backend);
      ADD_FAILURE() << "took a backend of other ranks";
    } catch (const UsageError& error) {
      expect_contains(error.what(), "of 4, but this is rank");
      expect_contains(error.what(), "of 2 of group \"threads/replicate\"");
    }
    whole.barrier();
  });
}

}  // namespace
}  // namespace fsdpp::comm
