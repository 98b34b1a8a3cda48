// Case 48: memory that peers address is taken by all ranks together, and early.
#include <algorithm>

#include "tests/support/hazard_watch.h"
#include "tests/support/noting_lanes.h"
#include "tests/support/row_model.h"

namespace fsdpp::test::cases_peer_memory_test {
namespace {

constexpr int64_t kDim = RowModel::kDim;

class CasesOfPeerMemory : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Strategies, CasesOfPeerMemory, all_ranks(), parameters_name);

// Also in steps that depart from what was planned, and differently on each rank.
TEST_P(CasesOfPeerMemory, Case48AllOfItIsTakenBeforeTheFirstStep) {
  Asked asked;
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    group.set_lanes(std::make_unique<NotingLanes>(group, asked, group.rank()));
    const auto net = std::make_shared<SmallNet>(6, kDim, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), options());
    const std::vector<std::string> before = asked.of(group.rank());
    EXPECT_FALSE(before.empty());
    for (int step = 0; step < 8; ++step) {
      if (step >= 4) net->skipped = {group.rank(), 5 - step % 3};
      net->reversed = step == 6 && group.rank() % 2 == 1;
      for (int index = 0; index < 2; ++index) {
        const auto scope = model->microbatch(index == 1);
        small_loss(net->run(small_batch(kDim, group.rank(), index))).backward();
      }
      integer_step(model->shards());
      model->zero_grad();
      EXPECT_EQ(asked.of(group.rank()), before) << "in step " << step;
    }
  });
  for (int rank = 1; rank < ranks(); ++rank) EXPECT_EQ(asked.of(rank), asked.of(0)) << "rank " << rank;
}

// Blocks that run in two rounds keep their slots open together, which nobody could plan before it was seen:
// what that takes, all ranks take between the same steps.
TEST_P(CasesOfPeerMemory, Case48WhatTheFirstStepsShowToBeNeededIsTakenByAll) {
  Asked asked;
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    group.set_lanes(std::make_unique<NotingLanes>(group, asked, group.rank()));
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), options());
    SmallNet oracle(3, kDim, Layers::oracle);
    const auto rounds = [](SmallNet& of, const at::Tensor& batch) {
      at::Tensor x = of.first->forward(batch);
      for (int round = 0; round < 2; ++round) {
        for (const auto& block : of.blocks) x = of.through(*block, x);
      }
      return of.last->forward(x);
    };
    std::size_t settled = 0;
    for (int step = 0; step < 8; ++step) {
      small_loss(call_as(*net, [&] {
        return rounds(*net, small_batch(kDim, group.rank(), step));
      })).backward();
      for (const at::Tensor& batch : all_batches(kDim, ranks(), step))
        small_loss(rounds(oracle, batch)).backward();
      expect_gradients(*model, oracle);
      model->weights_changed();
      model->zero_grad();
      clear(oracle);
      if (step == 4) settled = asked.of(group.rank()).size();
    }
    EXPECT_EQ(asked.of(group.rank()).size(), settled) << "it still grows";
  });
  for (int rank = 1; rank < ranks(); ++rank) EXPECT_EQ(asked.of(rank), asked.of(0)) << "rank " << rank;
  const std::vector<std::string> all = asked.of(0);
  const auto slots = std::count_if(all.begin(), all.end(),
                                   [](const std::string& what) { return what.ends_with("gradient slots"); });
  EXPECT_EQ(slots, reduces_every_backward() ? 2 : 1) << "at first, and when it had been seen";
}

// One rank alone needs more rows than there is room for: all take the room together.
TEST_P(CasesOfPeerMemory, Case48WhatOneRankNeedsMoreOfGrowsOnAll) {
  Asked asked;
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    group.set_lanes(std::make_unique<NotingLanes>(group, asked, group.rank()));
    const auto module = std::make_shared<RowModel>(Layers::fused);
    Options chosen = options();
    chosen.row_exchange_bytes = 0;
    const auto model =
        watched_shard(group, module, {{.modules = {module->table}, .use = runtime::Use::rows}}, chosen);
    RowModel oracle(Layers::oracle);
    for (int step = 0; step < 4; ++step) {
      const auto count = [&](int rank) { return rank == step % ranks() ? 4 * step + 1 : 2; };
      small_loss(call(*module, row_tokens(group.rank(), step, count(group.rank())))).backward();
      for (int rank = 0; rank < ranks(); ++rank)
        small_loss(oracle.forward(row_tokens(rank, step, count(rank)))).backward();
      expect_gradients(*model, oracle);
      integer_step(model->shards());
      integer_step(oracle.parameters());
      expect_weights(*model, oracle);
      model->zero_grad();
      clear(oracle);
    }
  });
  const auto rows = [&](int rank) {
    const std::vector<std::string> all = asked.of(rank);
    return std::count_if(all.begin(), all.end(),
                         [](const std::string& what) { return what.ends_with("embedding rows"); });
  };
  EXPECT_EQ(rows(0), reduces_every_backward() ? 4 : 0) << "in each step one rank had more";
  for (int rank = 1; rank < ranks(); ++rank) EXPECT_EQ(asked.of(rank), asked.of(0)) << "rank " << rank;
}

// A collective allocation that one rank alone comes to ends in an error that says who is missing.
TEST(CasesOfGrowth, Case48GrowthOnOneRankAloneIsAnErrorInTime) {
  for (const Strategy strategy : runtime::kStrategies) {
    const auto train = [&] {
      run_watched_ranks(
          2,
          [&](comm::PeerGroup& group) {
            const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
            const auto model = watched_shard(group, net, net->units(), Options{.strategy = strategy});
            const auto step = [&] { small_loss(net->run(small_batch(kDim, group.rank()))).backward(); };
            step();
            if (group.rank() == 1) static_cast<void>(group.lanes().allocate(1 << 16, "more slots"));
            step();
            step();
          },
          std::chrono::milliseconds(1000));
    };
    expect_in(thrown_text<PeerError>(train), "lost rank");
  }
  const auto differ = [](comm::PeerGroup& group) {
    static_cast<void>(group.lanes().allocate(group.rank() == 0 ? 4096 : 8192, "more slots"));
  };
  const std::string message = thrown_text([&] { run_watched_ranks(3, differ); });
  expect_in(message, "rank 0 4096 bytes for more slots");
  expect_in(message, "rank 1 8192 bytes for more slots");
}

}  // namespace
}  // namespace fsdpp::test::cases_peer_memory_test
