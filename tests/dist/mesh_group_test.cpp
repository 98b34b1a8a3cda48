// Parts of a group, and the groups along a mesh's axes.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/comm/mesh_group.h"
#include "tests/dist/gates.h"

namespace fsdpp::comm {
namespace {

using test::expect_contains;

TEST(MeshGroup, AxesMeetWhomTheyShould) {
  run_thread_ranks(6, [](PeerGroup& whole) {
    const MeshGroup mesh(whole, hybrid_mesh(6, 2));
    PeerGroup& shard = mesh.along("shard");
    PeerGroup& replicate = mesh.along("replicate");
    EXPECT_EQ(shard.ranks(), 3);
    EXPECT_EQ(replicate.ranks(), 2);
    EXPECT_EQ(shard.rank(), whole.rank() % 3);
    EXPECT_EQ(replicate.rank(), whole.rank() / 3);
    for (int i = 0; i < 50; ++i) {  // both at once, in any state of the others
      const double own = 100 * i + whole.rank();
      const std::vector<double> beside = shard.exchange(std::vector<double>{own});
      const std::vector<double> across = replicate.exchange(std::vector<double>{own});
      for (int peer = 0; peer < 3; ++peer) {
        EXPECT_EQ(shard.rank_in_whole(peer), whole.rank() / 3 * 3 + peer);
        EXPECT_EQ(beside[static_cast<std::size_t>(peer)], 100 * i + shard.rank_in_whole(peer));
      }
      for (int peer = 0; peer < 2; ++peer) {
        EXPECT_EQ(replicate.rank_in_whole(peer), whole.rank() % 3 + 3 * peer);
        EXPECT_EQ(across[static_cast<std::size_t>(peer)], 100 * i + replicate.rank_in_whole(peer));
      }
    }
    EXPECT_EQ(whole.rank_in_whole(4), 4);
  });
}

TEST(MeshGroup, PartsSeeTheirMembersMemory) {
  run_thread_ranks(4, [](PeerGroup& whole) {
    const MeshGroup mesh(whole, hybrid_mesh(4, 2));
    PeerGroup& shard = mesh.along("shard");
    const auto all = whole.allocate(64, "a test");
    const auto seen = shard.view(all);
    const auto own = shard.allocate(64, "a test");
    EXPECT_EQ(seen->bytes(), 64U);
    for (int peer = 0; peer < 2; ++peer) EXPECT_EQ(seen->peer(peer), all->peer(shard.rank_in_whole(peer)));
    EXPECT_EQ(whole.view(all), all);
    *own->peer(shard.rank()) = std::byte(whole.rank() + 1);
    whole.barrier();
    for (int peer = 0; peer < 2; ++peer)
      EXPECT_EQ(*own->peer(peer), std::byte(shard.rank_in_whole(peer) + 1));
    whole.barrier();
  });
}

TEST(MeshGroup, WhatIsNoMeshOfTheGroupSaysSo) {
  EXPECT_THROW(static_cast<void>(hybrid_mesh(4, 3)), UsageError);
  EXPECT_THROW(static_cast<void>(hybrid_mesh(4, 0)), UsageError);
  run_thread_ranks(2, [](PeerGroup& whole) {
    const auto refused = [](const auto& act) {
      try {
        act();
      } catch (const UsageError& error) {
        return std::string(error.what());
      }
      return std::string("nothing was thrown");
    };
    expect_contains(refused([&] { MeshGroup(whole, hybrid_mesh(4, 2)); }), "the mesh has 4 ranks");
    expect_contains(refused([&] { static_cast<void>(whole.part({1, 0}, "p")); }), "1, 0");
    expect_contains(refused([&] { static_cast<void>(whole.part({0, 2}, "p")); }),
                    "increasing ranks from 0 to 1");
    expect_contains(refused([&] { static_cast<void>(whole.part({1 - whole.rank()}, "p")); }), "among them");
    const MeshGroup mesh(whole, hybrid_mesh(2, 2));
    expect_contains(refused([&] { static_cast<void>(mesh.along("column")); }), "'column'");
  });
}

// A part waits for its members alone, and names the rank that is lost.
TEST(MeshGroup, ALostRankIsNoticedInItsPart) {
  EXPECT_THROW(run_thread_ranks(4,
                                [](PeerGroup& whole) {
                                  const MeshGroup mesh(whole, hybrid_mesh(4, 2));
                                  if (whole.rank() == 3) throw std::runtime_error("gone");
                                  if (whole.rank() == 2) {
                                    EXPECT_THROW(mesh.along("shard").barrier(), PeerError);
                                  } else if (whole.rank() < 2) {
                                    EXPECT_NO_THROW(mesh.along("shard").barrier());
                                  }
                                }),
               std::runtime_error);
}

}  // namespace
}  // namespace fsdpp::comm
