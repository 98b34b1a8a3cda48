// The traps between autograd's habits and ours: each test fails where the simple way is taken.
#include <ATen/autocast_mode.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "fsdpp/nn/linear.h"
#include "fsdpp/trace/recorder.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::traps_autograd_test {
namespace {

using device::OperationKind;

constexpr int64_t kDim = 8;

class TrapAutograd : public OnRanks {
 public:
  static std::shared_ptr<ShardedModel> shard(comm::PeerGroup& group, const std::shared_ptr<SmallNet>& net) {
    return watched_shard(group, net, net->units(), options());
  }
};
INSTANTIATE_TEST_SUITE_P(Strategies, TrapAutograd, all_ranks(), parameters_name);

// A training step on `net` and on an oracle that ends with equal gradients and weights.
void expect_right_step(ShardedModel& model, SmallNet& net, SmallNet& oracle, comm::PeerGroup& group,
                       int index = 3) {
  model.zero_grad();
  clear(oracle);
  small_loss(net.run(small_batch(kDim, group.rank(), index))).backward();
  oracle_backward(oracle, all_batches(kDim, group.ranks(), index));
  expect_gradients(model, oracle);
  EXPECT_TRUE(model.at_rest());
}

// All ranks' batches through `forward`, as the oracle's backward.
template <class Forward>
void for_all_batches(int ranks, Forward&& forward) {
  for (const at::Tensor& batch : all_batches(kDim, ranks)) small_loss(forward(batch)).backward();
}

class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

// One autocast region over two steps: its cache of casts is keyed by the tensor, which stays the same.
TEST_P(TrapAutograd, AutocastSeesTheWeightAfterAStep) {
  for (const Layers layers : {Layers::unfused, Layers::fused}) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(2, kDim, layers);
      const auto model = shard(group, net);
      SmallNet oracle(2, kDim, Layers::oracle);
      const at::Tensor input = small_batch(kDim, group.rank());
      const Autocast autocast;
      for (int step = 0; step < 3; ++step) {
        const at::Tensor output = net->run(input);
        EXPECT_EQ(output.scalar_type(), at::kBFloat16);
        // The cache is one for the process: what the oracle put there, another rank thread could clear under
        // it.
        at::autocast::set_autocast_cache_enabled(false);
        expect_same(output.detach(), oracle.run(input).detach(), text("output of step ", step));
        at::autocast::set_autocast_cache_enabled(true);
        small_loss(output.to(at::kFloat)).backward();
        integer_step(model->shards());
        const std::vector<at::Tensor> weights = model->full_weights();
        const at::NoGradGuard no_grad;
        for (std::size_t i = 0; i < weights.size(); ++i) oracle.parameters()[i].copy_(weights[i]);
      }
    });
  }
}

TEST_P(TrapAutograd, InferenceModeFirstThenTraining) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    SmallNet oracle(2, kDim, Layers::oracle);
    std::shared_ptr<ShardedModel> model;
    {
      const c10::InferenceMode inference;
      model = shard(group, net);
      const at::Tensor input = small_batch(kDim, group.rank());
      expect_same(net->run(input), oracle.run(input), "output in inference mode");
    }
    expect_right_step(*model, *net, oracle, group);
    integer_step(model->shards());
    integer_step(oracle.parameters());
    expect_right_step(*model, *net, oracle, group);
  });
}

TEST_P(TrapAutograd, CreateGraphWithAFusedLayerThrowsAndIsForgotten) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto model = shard(group, net);
    const at::Tensor loss = small_loss(net->run(small_batch(kDim, group.rank())));
    const std::string message =
        thrown_text([&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); });
    expect_in(message, "create_graph");
    expect_in(message, "fused = false");
    SmallNet oracle(2, kDim, Layers::oracle);
    expect_right_step(*model, *net, oracle, group);
  });
}

TEST_P(TrapAutograd, CreateGraphWithoutFusionWorks) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::unfused);
    const auto model = shard(group, net);
    SmallNet oracle(2, kDim, Layers::oracle);
    small_loss(net->run(small_batch(kDim, group.rank())))
        .backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    oracle_backward(oracle, all_batches(kDim, ranks()));
    expect_gradients(*model, oracle);
  });
}

TEST_P(TrapAutograd, GradOverAFusedWeightReturnsItAndLeavesSlotsAlone) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = shard(group, net);
    SmallNet oracle(3, kDim, Layers::oracle);
    trace::Recorder recorder;
    model->device().observe(&recorder);
    const auto own_gradients = [&](SmallNet& of) {
      const at::Tensor loss = small_loss(of.run(small_batch(kDim, group.rank())));
      return torch::autograd::grad({loss},
                                   {of.blocks[1]->up->weight, of.blocks[1]->up->bias, of.first->weight});
    };
    const auto ours = own_gradients(*net);
    const auto expected = own_gradients(oracle);
    for (std::size_t i = 0; i < ours.size(); ++i) expect_same(ours[i], expected[i], text("gradient ", i));
    model->device().unobserve(&recorder);
    EXPECT_EQ(recorder.count(OperationKind::acquire, "slot "), 0U);
    EXPECT_EQ(recorder.count(OperationKind::signal, "ready "), 0U);
    EXPECT_EQ(recorder.count(OperationKind::run, "wgrad "), 0U);
    for (const at::Tensor& shard : model->shards()) EXPECT_FALSE(shard.grad().defined());
    EXPECT_TRUE(model->at_rest());
    expect_right_step(*model, *net, oracle, group);
  });
}

TEST_P(TrapAutograd, AWeightWithATensorHookIsNotFusedAndTheHookCounts) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto model = shard(group, net);
    SmallNet oracle(2, kDim, Layers::oracle);
    trace::Recorder recorder;
    model->device().observe(&recorder);
    int calls = 0;
    net->blocks[0]->up->weight.register_hook([&calls](const at::Tensor& gradient) {
      ++calls;
      return gradient * 3;
    });
    oracle.blocks[0]->up->weight.register_hook([](const at::Tensor& gradient) { return gradient * 3; });
    expect_right_step(*model, *net, oracle, group);
    model->device().unobserve(&recorder);
    EXPECT_EQ(calls, 1);
    const auto fused = [&](const std::string& weight) {
      return recorder.count(OperationKind::run, "wgrad " + weight) +
             recorder.count(OperationKind::run, "late wgrad " + weight);
    };
    EXPECT_EQ(fused("block0.up.weight"), 0U);
    EXPECT_GE(fused("block0.down.weight"), 1U);
  });
}

// An auxiliary loss on an inner unit's output meets no hook of the root; the root's weights before it are
// needed, too.
TEST_P(TrapAutograd, ALossOnASideOutputAlone) {
  for (const Layers layers : {Layers::fused, Layers::unfused}) {
    for (const bool main_first : {false, true}) {
      run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
        const auto net = std::make_shared<SmallNet>(4, kDim, layers);
        const auto model = shard(group, net);
        SmallNet oracle(4, kDim, Layers::oracle);
        const auto backward = [&](SmallNet& of, const at::Tensor& batch) {
          of.side_of = 1;
          const at::Tensor input = batch.clone().requires_grad_();
          const at::Tensor main = small_loss(of.run(input));
          const at::Tensor side = small_loss(of.side * 2);
          if (main_first) main.backward({}, /*retain_graph=*/true);
          side.backward();
          return input.grad();
        };
        const at::Tensor input_gradient = backward(*net, small_batch(kDim, group.rank()));
        for (int rank = 0; rank < ranks(); ++rank) {
          const at::Tensor expected = backward(oracle, small_batch(kDim, rank));
          if (rank == group.rank()) expect_same(input_gradient, expected, "gradient of the input");
        }
        expect_gradients(*model, oracle);
        EXPECT_TRUE(model->at_rest());
        expect_right_step(*model, *net, oracle, group);
      });
    }
  }
}

TEST_P(TrapAutograd, AUnitCalledTwiceInOneForward) {
  for (const Layers layers : {Layers::fused, Layers::unfused}) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(3, kDim, layers);
      const auto model = shard(group, net);
      SmallNet oracle(3, kDim, Layers::oracle);
      for (const int uses : {2, 1, 3}) {
        net->uses = oracle.uses = uses;
        expect_right_step(*model, *net, oracle, group, uses);
      }
    });
  }
}

TEST_P(TrapAutograd, AUnitsOutputChangedInPlaceAfterTheCall) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto model = shard(group, net);
    SmallNet oracle(2, kDim, Layers::oracle);
    const auto forward = [](SmallNet& of, const at::Tensor& batch) {
      at::Tensor x = of.through(*of.blocks[0], of.first->forward(batch));
      x.mul_(2);
      at::Tensor y = of.through(*of.blocks[1], x);
      y.relu_();
      at::Tensor z = of.last->forward(y);
      z.add_(y);
      return z;
    };
    for (int step = 0; step < 2; ++step) {
      at::Tensor output = call_as(*net, [&] { return forward(*net, small_batch(kDim, group.rank())); });
      output.mul_(3);
      small_loss(output).backward();
      for_all_batches(ranks(), [&](const at::Tensor& batch) { return forward(oracle, batch).mul_(3); });
      expect_gradients(*model, oracle);
      EXPECT_TRUE(model->at_rest());
    }
  });
}

// Stop-gradient: the weight is read for an input gradient after its own gradient is complete.
class DetachedTwice : public torch::nn::Module {
 public:
  explicit DetachedTwice(Layers layers) : kind(layers) {
    weight = register_parameter("weight", integers({kDim, kDim}, 3));
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& input) const {
    const at::Tensor frozen = at::linear(input, weight.detach());
    return SmallLinear::product(kind, frozen, weight, {});
  }
  at::Tensor weight;
  Layers kind;
};

TEST_P(TrapAutograd, AWeightIsStillReadAfterItsGradientIsComplete) {
  for (const Layers layers : {Layers::fused, Layers::unfused}) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const auto module = std::make_shared<DetachedTwice>(layers);
      const auto model =
          watched_shard(group, module, std::vector<std::shared_ptr<torch::nn::Module>>{}, options());
      DetachedTwice oracle(Layers::oracle);
      const at::Tensor input = small_batch(kDim, group.rank()).requires_grad_();
      const at::Tensor same = small_batch(kDim, group.rank()).requires_grad_();
      small_loss(call(*module, input)).backward();
      small_loss(oracle.forward(same)).backward();
      expect_same(input.grad(), same.grad(), "gradient of the input");
    });
  }
}

}  // namespace
}  // namespace fsdpp::test::traps_autograd_test
