// Layers in models that nobody had trained.
#include <ATen/autocast_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

#include "fsdpp/comm/c10d_collectives.h"
#include "fsdpp/nn/grouped_linear.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"
#include "tests/support/thread_c10d.h"

namespace fsdpp::test::layers_test {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kDim = 4;

// Three experts of two rows each, of which two have one weight.
class Repeated : public torch::nn::Module {
 public:
  explicit Repeated(Layers layers) : layers_(layers) {
    one = register_parameter("one", integers({kDim, kDim}, 3));
    other = register_parameter("other", integers({kDim, kDim}, 4));
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const {
    if (layers_ == Layers::fused)
      return nn::grouped_linear(x, std::vector{one, other, one}, at::tensor({2, 4, 6}, at::kInt));
    return at::cat({at::linear(x.narrow(0, 0, 2), one), at::linear(x.narrow(0, 2, 2), other),
                    at::linear(x.narrow(0, 4, 2), one)});
  }
  at::Tensor one, other;

 private:
  Layers layers_;
};

// One of its uses was lost.
TEST(Layers, OneWeightOfTwoExpertsGetsBothGradients) {
  for (const Strategy strategy : runtime::kStrategies) {
    for (const bool delay : {false, true}) {
      SCOPED_TRACE(text(runtime::to_string(strategy), delay ? ", delayed" : ""));
      run_watched_ranks(kRanks, [&](comm::PeerGroup& group) {
        const auto net = std::make_shared<Repeated>(Layers::fused);
        const auto model =
            watched_shard(group, net, std::vector<runtime::UnitSpec>{},
                          {.strategy = strategy, .combine = Combine::sum, .delay_wgrad = delay});
        Repeated oracle(Layers::oracle);
        for (int step = 0; step < 2; ++step) {
          small_loss(call(*net, small_batch(kDim, group.rank(), step, 6))).backward();
          model->backward_dw();
          for (int rank = 0; rank < kRanks; ++rank)
            small_loss(oracle.forward(small_batch(kDim, rank, step, 6))).backward();
          expect_gradients(*model, oracle);
          model->zero_grad();
          for (at::Tensor weight : oracle.parameters()) weight.mutable_grad().reset();
        }
      });
    }
  }
}

// Weights (0, 4) and (4, 0), beside one that has elements.
class WithoutElements : public torch::nn::Module {
 public:
  explicit WithoutElements(Layers layers) : layers_(layers) {
    none_out = register_parameter("none_out", at::zeros({0, kDim}));
    none_in = register_parameter("none_in", at::zeros({kDim, 0}));
    bias = register_parameter("bias", integers({kDim}, 6));
    full = register_parameter("full", integers({kDim, kDim}, 5));
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const {
    const at::Tensor y = SmallLinear::product(layers_, x, full, bias);
    const at::Tensor nothing = SmallLinear::product(layers_, y, none_out, {});
    return y + nothing.sum() + SmallLinear::product(layers_, y.narrow(1, 0, 0), none_in, bias);
  }
  at::Tensor none_out, none_in, bias, full;

 private:
  Layers layers_;
};

TEST(Layers, WeightsWithoutElementsGoThroughABackward) {
  run_watched_ranks(kRanks, [](comm::PeerGroup& group) {
    const auto net = std::make_shared<WithoutElements>(Layers::fused);
    const auto model = watched_shard(group, net, std::vector<runtime::UnitSpec>{}, {.combine = Combine::sum});
    small_loss(call(*net, small_batch(kDim, group.rank()))).backward();
    WithoutElements oracle(Layers::oracle);
    for (int rank = 0; rank < kRanks; ++rank) small_loss(oracle.forward(small_batch(kDim, rank))).backward();
    const std::vector<at::Tensor> gradients = model->full_gradients();
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const std::string name = model->parameters()[i].first;
      const at::Tensor its = oracle.named_parameters()[name].grad();
      if (its.numel() > 0) expect_same(gradients[i], its, name);
    }
  });
}

// A ReLU as a unit: by hand it was dereferenced.
TEST(Layers, AUnitWithoutParametersIsReducedByHandAsNothing) {
  struct Relu : torch::nn::Module {
    [[nodiscard]] at::Tensor forward(const at::Tensor& x) const { return at::relu(x); }
  };
  struct Net : torch::nn::Module {
    Net() {
      first = register_module("first", std::make_shared<SmallLinear>(kDim, kDim, Layers::fused, 3));
      relu = register_module("relu", std::make_shared<Relu>());
    }
    [[nodiscard]] at::Tensor forward(const at::Tensor& x) const { return call(*relu, first->forward(x)); }
    std::shared_ptr<SmallLinear> first;
    std::shared_ptr<Relu> relu;
  };
  run_watched_ranks(kRanks, [](comm::PeerGroup& group) {
    const auto net = std::make_shared<Net>();
    const auto model = watched_shard(group, net, {{.modules = {net->relu}}}, {.combine = Combine::sum});
    model->gather(*net->relu);
    model->release(*net->relu);
    model->reduce_by_hand(true);
    small_loss(call(*net, small_batch(kDim, group.rank()))).backward();
    model->reduce(*net->relu);
    model->reduce(*net);
    model->finish_reduces();
    EXPECT_TRUE(model->full_gradients().front().defined());
  });
}

// Steps of `net`, each beside `oracle`'s: `backward(net, batch)` runs one rank's.
template <class Backward>
void train_beside(ShardedModel& model, SmallNet& net, SmallNet& oracle, int rank, int steps,
                  Backward backward) {
  for (int step = 0; step < steps; ++step) {
    backward(net, small_batch(kDim, rank, step));
    for (const at::Tensor& batch : all_batches(kDim, model.group().ranks(), step)) backward(oracle, batch);
    expect_gradients(model, oracle);
    integer_step(model.shards());
    integer_step(oracle.parameters());
    model.zero_grad();
    clear(oracle);
  }
}

void plain_backward(SmallNet& net, const at::Tensor& batch) { small_loss(net.run(batch)).backward(); }

void backward_of_a_penalty(SmallNet& net, at::Tensor batch) {
  batch.requires_grad_();
  const at::Tensor loss = small_loss(net.run(batch));
  const at::Tensor gradient =
      torch::autograd::grad({loss}, {batch}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  (gradient.sum() + loss).backward();
}

// As the error of create_graph says: without it, what a second derivative reads has been released.
TEST(Layers, SecondDerivativesOfUnitsThatAreHeld) {
  for (const Strategy strategy : runtime::kStrategies) {
    SCOPED_TRACE(runtime::to_string(strategy));
    run_watched_ranks(kRanks, [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(3, kDim, Layers::unfused);
      const auto model = watched_shard(group, net, net->units(),
                                       {.strategy = strategy, .combine = Combine::sum, .fused = false});
      SmallNet oracle(3, kDim, Layers::oracle);
      model->hold_all();
      train_beside(*model, *net, oracle, group.rank(), 2, backward_of_a_penalty);
      model->release_all();
    });
  }
}

// What a held unit gathers anew waited for nothing that the last backward left: a hazard.
TEST(Layers, UnitsHeldOverStepsKeepTheLanesInOrder) {
  for (const Strategy strategy : runtime::kStrategies) {
    for (const bool all : {false, true}) {
      SCOPED_TRACE(text(runtime::to_string(strategy), all ? ", all" : ", one"));
      run_watched_ranks(kRanks, [&](comm::PeerGroup& group) {
        const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
        const auto model =
            watched_shard(group, net, net->units(), {.strategy = strategy, .combine = Combine::sum});
        SmallNet oracle(2, kDim, Layers::oracle);
        if (all) {
          model->hold_all();
        } else {
          model->gather(*net->blocks[0]);
        }
        train_beside(*model, *net, oracle, group.rank(), 4, plain_backward);
        model->release_all();
      });
    }
  }
}

// Its part was kept for the neighbours on the gather lane, which nothing waited for any more: a step could
// not have been captured as a graph.
TEST(Layers, ABlockThatIsLeftOutLeavesNoLaneBehind) {
  run_watched_ranks(4, [](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto model =
        watched_shard(group, net, net->units(), {.combine = Combine::sum, .reshard_after_forward = 2});
    SmallNet oracle(2, kDim, Layers::oracle);
    net->skipped = oracle.skipped = {1};
    train_beside(*model, *net, oracle, group.rank(), 3, plain_backward);
  });
}

// A rank whose region is all padding was said to send bytes that nobody had written.
TEST(Layers, WeightsThatLeaveARankNothingGoThroughC10d) {
  run_watched_ranks(3, [](comm::PeerGroup& group) {
    comm::use_c10d(group, ThreadC10d::over(group));
    const auto net = std::make_shared<SmallNet>(2, 8, Layers::fused);
    const auto model =
        watched_shard(group, net, net->units(), {.strategy = Strategy::no_shard, .combine = Combine::sum});
    SmallNet oracle(2, 8, Layers::oracle);
    small_loss(net->run(small_batch(8, group.rank()))).backward();
    oracle_backward(oracle, all_batches(8, 3));
    expect_gradients(*model, oracle);
  });
}

TEST(Layers, ARefusedForwardLeavesAutocastAsItWas) {
  run_watched_ranks(kRanks, [](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), {.combine = Combine::sum});
    const auto run = [&] { return small_loss(net->run(small_batch(kDim, group.rank()))); };
    const bool before = at::autocast::is_autocast_cache_enabled();
    model->reduce_by_hand(true);
    run().backward();
    model->weights_changed();
    expect_in(thrown_text([&] { static_cast<void>(run()); }), "still to be reduced");
    EXPECT_EQ(at::autocast::is_autocast_cache_enabled(), before);
    model->finish_reduces();
    run().backward();
    model->finish_reduces();
    EXPECT_EQ(at::autocast::is_autocast_cache_enabled(), before);
  });
}

}  // namespace
}  // namespace fsdpp::test::layers_test
