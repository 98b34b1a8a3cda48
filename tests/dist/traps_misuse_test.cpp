// What users do to a sharded module by mistake: an error that names the place and the remedy, never silence.
#include <ATen/ops/sum.h>
#include <torch/nn/cloneable.h>
#include <torch/optim/sgd.h>

#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::traps_misuse_test {
namespace {

constexpr int64_t kDim = 8;

class TrapMisuse : public OnRanks {
 public:
  static std::shared_ptr<ShardedModel> shard(comm::PeerGroup& group, const std::shared_ptr<SmallNet>& net) {
    return watched_shard(group, net, net->units(), options());
  }
};
INSTANTIATE_TEST_SUITE_P(Strategies, TrapMisuse, all_ranks(), parameters_name);

TEST(TrapMisuseDeathTest, AViewOfAReleasedWeightEndsTheProcessNamingTheUnit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto read_a_stale_view = [] {
    run_watched_ranks(1, [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
      const auto model = watched_shard(group, net, net->units(), sharded_sum());
      model->hold_all();
      const at::Tensor view = net->blocks[1]->up->weight.t();
      model->release_all();
      (void)at::sum(view).item<float>();
    });
  };
  EXPECT_DEATH(read_a_stale_view(), "outlived its weights.*block1");
}

TEST(TrapMisuse, Case32AReleasedWeightThrowsNamingUnitAndRemedy) {
  for (const int ranks : {1, 3}) {
    run_watched_ranks(ranks, [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
      const auto model = watched_shard(group, net, net->units(), sharded_sum());
      const at::Tensor input = small_batch(kDim, 0);
      const std::vector<std::function<void()>> uses = {
          [&] { (void)at::sum(net->blocks[1]->up->weight); },
          [&] { (void)net->blocks[1]->forward(input); },
          [&] { (void)net->blocks[1]->up->forward(input); },
          [&] { net->blocks[1]->up->bias.detach().zero_(); },
          [&] { (void)net->blocks[1]->up->weight.clone(); },
      };
      for (const auto& use : uses) {
        const std::string message = thrown_text<std::exception>(use);
        expect_in(message, "block1");
        expect_in(message, "fsdpp::call");
        expect_in(message, "full_weights()");
      }
      expect_in(thrown_text<std::exception>([&] { (void)net->first->forward(input); }), "root");
      small_loss(net->run(small_batch(kDim, group.rank()))).backward();
      SmallNet oracle(2, kDim, Layers::oracle);
      oracle_backward(oracle, all_batches(kDim, ranks));
      expect_gradients(*model, oracle);
    });
  }
}

TEST_P(TrapMisuse, Case37AnOptimizerOnParametersThrowsBuiltBeforeOrAfter) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    torch::optim::SGD before(net->parameters(), 0.5);
    const auto model = shard(group, net);
    torch::optim::SGD after(net->parameters(), 0.5);
    SmallNet oracle(2, kDim, Layers::oracle);
    for (torch::optim::SGD* optimizer : {&before, &after}) {
      optimizer->zero_grad();
      small_loss(net->run(small_batch(kDim, group.rank()))).backward();
      expect_in(thrown_text<std::exception>([&] { optimizer->step(); }), "shards()");
      expect_weights(*model, oracle);  // nothing was written
    }
    torch::optim::SGD right(model->shards(), torch::optim::SGDOptions(0.5));
    torch::optim::SGD plain(oracle.parameters(), torch::optim::SGDOptions(0.5));
    right.zero_grad();
    small_loss(net->run(small_batch(kDim, group.rank()))).backward();
    oracle_backward(oracle, all_batches(kDim, ranks()));
    right.step();
    plain.step();
    expect_weights(*model, oracle);
  });
}

TEST_P(TrapMisuse, ToAfterShardingThrows) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto model = shard(group, net);
    const at::Tensor input = small_batch(kDim, group.rank());
    if (sharded()) {
      expect_in(thrown_text<std::exception>([&] { net->to(at::kDouble); }), "root");
      (void)net->run(input);  // nothing was changed
    }
    model->hold_all();
    net->to(at::kDouble);
    model->release_all();
    const std::string message = thrown_text([&] { (void)net->run(input); });
    expect_in(message, "first.");
    expect_in(message, "to()");
    expect_in(message, "before fully_shard()");
  });
}

TEST_P(TrapMisuse, RequiresGradChangedAfterShardingThrows) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto model = shard(group, net);
    net->blocks[1]->up->weight.requires_grad_(false);
    const std::string message = thrown_text([&] { (void)net->run(small_batch(kDim, group.rank())); });
    expect_in(message, "block1.up.weight");
    expect_in(message, "requires_grad");
    net->blocks[1]->up->weight.requires_grad_(true);  // back: it goes on
    small_loss(net->run(small_batch(kDim, group.rank()))).backward();
    SmallNet oracle(2, kDim, Layers::oracle);
    oracle_backward(oracle, all_batches(kDim, ranks()));
    expect_gradients(*model, oracle);
    EXPECT_TRUE(model->at_rest());
  });
}

TEST(TrapMisuse, IllegalUnitsAreNamed) {
  run_watched_ranks(1, [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto other = std::make_shared<SmallBlock>(kDim, Layers::fused, 3);
    using Units = std::vector<std::shared_ptr<torch::nn::Module>>;
    const auto shard = [&](Units units) { (void)watched_shard(group, net, units, sharded_sum()); };
    expect_in(thrown_text([&] { shard({other}); }), "not part of the root");
    expect_in(thrown_text([&] { shard({net->blocks[0], net->blocks[0]}); }), "block0");
    expect_in(thrown_text([&] { shard({net}); }), "twice");
    const auto model = watched_shard(group, net, net->units(), sharded_sum());
    expect_in(thrown_text([&] { shard({}); }), "already a unit");
    expect_in(thrown_text([&] { (void)watched_shard(group, net->blocks[0]->up, Units{}, sharded_sum()); }),
              "belongs to a sharded model");
  });
}

class Copyable : public torch::nn::Cloneable<Copyable> {
 public:
  Copyable() { reset(); }
  void reset() override { weight = register_parameter("weight", integers({5, 3}, 4)); }
  at::Tensor forward(const at::Tensor& input) { return at::linear(input, weight); }
  at::Tensor weight;
};

TEST_P(TrapMisuse, Case33ADeepCopyIsAClearErrorOrAWholeModule) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto module = std::make_shared<Copyable>();
    const auto model =
        watched_shard(group, module, std::vector<std::shared_ptr<torch::nn::Module>>{}, options());
    if (sharded()) {
      const std::string message = thrown_text<std::exception>([&] { (void)module->clone(); });
      expect_in(message, "root");
      expect_in(message, "full_weights()");
      return;
    }
    const auto copy = std::dynamic_pointer_cast<Copyable>(module->clone());
    expect_same(copy->weight, integers({5, 3}, 4), "the copy's weight");
    EXPECT_EQ(runtime::find_unit(*copy).unit, -1) << "a copy is no unit";
  });
}

}  // namespace
}  // namespace fsdpp::test::traps_misuse_test
