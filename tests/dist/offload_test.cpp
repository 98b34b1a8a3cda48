// Main weights, their gradients and the optimizer's state in host memory.
#include "fsdpp/optim/adamw.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::offload_test {
namespace {

constexpr int64_t kDim = 8;

class Offload : public OnRanks {
 public:
  static Options offloaded() {
    Options chosen = options();
    chosen.offload = true;
    return chosen;
  }
  /// Where nothing is sharded there is nothing to bring down: refused, by name.
  static void expect_refused() {
    run_watched_ranks(ranks(), [](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(1, kDim, Layers::fused);
      expect_in(thrown_text([&] { static_cast<void>(fully_shard(group, net, net->units(), offloaded())); }),
                "offload with strategy no_shard");
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Strategies, Offload, all_ranks(), parameters_name);

// What nobody cleared is added to, in host memory too: by the window's last backward and not before.
TEST_P(Offload, WindowsThatAreNotClearedAddUp) {
  if (!sharded()) return expect_refused();
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), offloaded());
    SmallNet oracle(3, kDim, Layers::oracle);
    for (int window = 0; window < 4; ++window) {
      for (const int index : {2 * window, 2 * window + 1}) {
        const auto scope = model->microbatch(index % 2 == 1);
        small_loss(net->run(small_batch(kDim, group.rank(), index))).backward();
        oracle_backward(oracle, all_batches(kDim, ranks(), index));
      }
      expect_gradients(*model, oracle);
      if (window != 1) continue;
      model->zero_grad(/*set_to_none=*/false);
      clear(oracle);
    }
  });
}

// The optimizer reads gradients and writes weights on the host right behind the backward: the hazard checker
// looks whether what it reads has come down, and whether what it writes has been sent.
TEST_P(Offload, AdamWOnTheHostStepsAsWithTheLanes) {
  if (!sharded()) return expect_refused();
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto twin = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), offloaded());
    const auto other = watched_shard(group, twin, twin->units(), options());
    optim::AdamW host(*model, {});
    optim::AdamW lanes(*other, {});
    for (int step = 0; step < 4; ++step) {
      small_loss(net->run(small_batch(kDim, group.rank(), step))).backward();
      host.step(0.1);
      model->zero_grad();
      small_loss(twin->run(small_batch(kDim, group.rank(), step))).backward();
      lanes.step(0.1);
      other->zero_grad();
    }
    const std::vector<at::Tensor> expected = other->full_weights();
    const std::vector<at::Tensor> weights = model->full_weights();
    for (std::size_t i = 0; i < weights.size(); ++i) expect_same(weights[i], expected[i], text("weight ", i));
    const auto& purposes = model->memory().by_purpose();
    EXPECT_GT(purposes.at("main weights in host memory"), 0);
    EXPECT_GT(purposes.at("gradients in host memory"), 0);
    EXPECT_EQ(purposes.count("main weights") == 0 || purposes.at("main weights") == 0, true);
  });
}

}  // namespace
}  // namespace fsdpp::test::offload_test
