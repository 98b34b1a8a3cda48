// Cases of hooks that see gradients (numbers: the project's list of cases).
#include <torch/csrc/autograd/function_hook.h>

#include <array>
#include <atomic>
#include <stdexcept>

#include "fsdpp/trace/recorder.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::cases_hooks_test {
namespace {

using device::OperationKind;

constexpr int64_t kDim = 8;

class CasesOfHooks : public OnRanks {
 public:
  static Options maybe_offloaded(bool offload) {
    Options chosen = options();
    chosen.offload = offload;
    return chosen;
  }
};
INSTANTIATE_TEST_SUITE_P(Strategies, CasesOfHooks, all_ranks(), parameters_name);

using Act = std::function<void(std::size_t, const at::Tensor&)>;

// What Python's register_post_accumulate_grad_hook makes.
class Hook final : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(std::size_t index, Act act) : index_(index), act_(std::move(act)) {}
  void operator()(const at::Tensor& leaf) override { act_(index_, leaf); }

 private:
  std::size_t index_;
  Act act_;
};

// `act` gets the number of the leaf, and the leaf.
void set_hooks(const std::vector<at::Tensor>& leaves, const Act& act) {
  for (std::size_t i = 0; i < leaves.size(); ++i)
    torch::autograd::impl::set_post_acc_grad_hooks(leaves[i], std::make_unique<Hook>(i, act));
}

// What hooks of a model's shards were called with.
class Calls {
 public:
  explicit Calls(ShardedModel& model) : shards_(model.shards()) {
    set_hooks(shards_, [this](std::size_t index, const at::Tensor& shard) {
      EXPECT_TRUE(shard.is_same(shards_[index]));
      EXPECT_FALSE(at::GradMode::is_enabled()) << "it may write its leaf";
      calls_.emplace_back(index, shard.grad().clone());
    });
  }
  void expect_none(const std::string& when) const { EXPECT_TRUE(calls_.empty()) << when; }
  // Each shard's was called, in the order of shards(), with what the gradient is now. Forgets the calls.
  void expect_each_once(const std::string& when) {
    std::vector<std::size_t> called, expected;
    for (const auto& [index, gradient] : calls_) {
      called.push_back(index);
      expect_same(gradient, shards_[index].grad(), text("what the hook of shard ", index, " saw ", when));
    }
    for (std::size_t i = 0; i < shards_.size(); ++i) {
      if (shards_[i].requires_grad()) expected.push_back(i);
    }
    EXPECT_EQ(called, expected) << when;
    calls_.clear();
  }

 private:
  std::vector<at::Tensor> shards_;
  std::vector<std::pair<std::size_t, at::Tensor>> calls_;
};

// The gradients are one process's, one weight is frozen, and one unit has none in the last window.
TEST_P(CasesOfHooks, Case10AHookOfAShardSeesItsReducedGradientOncePerWindow) {
  for (const bool offload : {false, true}) {
    if (offload && !sharded()) continue;  // refused
    std::atomic<int> empty = 0;
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
      SmallNet oracle(3, kDim, Layers::oracle);
      for (SmallNet* of : {net.get(), &oracle}) of->blocks[0]->up->weight.set_requires_grad(false);
      const auto model = watched_shard(group, net, net->units(), maybe_offloaded(offload));
      for (const at::Tensor& shard : model->shards()) empty += shard.numel() == 0 ? 1 : 0;
      Calls calls(*model);
      for (const int microbatches : {1, 3, 2}) {
        if (microbatches == 2) net->skipped = oracle.skipped = {1};
        for (int index = 0; index < microbatches; ++index) {
          calls.expect_none(text("before microbatch ", index, " of ", microbatches));
          const auto scope = model->microbatch(index + 1 == microbatches);
          small_loss(net->run(small_batch(kDim, group.rank(), index))).backward();
          oracle_backward(oracle, all_batches(kDim, ranks(), index));
        }
        expect_gradients(*model, oracle);
        calls.expect_each_once(text("in a window of ", microbatches));
        if (microbatches == 1) continue;  // what is not cleared is added to
        model->zero_grad();
        clear(oracle);
      }
    });
    EXPECT_EQ(empty > 0, sharded() && ranks() > 1 && (GetParam().replicas < ranks() || parted()))
        << "some hooks were those of empty pieces";
  }
}

TEST_P(CasesOfHooks, Case10HooksWaitForDelayedGradientsAndForReducesByHand) {
  for (const bool by_hand : {false, true}) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
      SmallNet oracle(3, kDim, Layers::oracle);
      Options chosen = options();
      chosen.delay_wgrad = !by_hand;
      const auto model = watched_shard(group, net, net->units(), chosen);
      if (by_hand) model->reduce_by_hand(true);
      Calls calls(*model);
      for (int round = 0; round < 3; ++round) {
        for (const int index : {0, 1}) {
          small_loss(net->run(small_batch(kDim, group.rank(), index))).backward();
          oracle_backward(oracle, all_batches(kDim, ranks(), index));
        }
        by_hand ? model->reduce(*net->blocks[2]) : model->backward_dw(*net->blocks[2]);
        calls.expect_none("while other units wait");
        by_hand ? model->finish_reduces() : model->backward_dw();
        expect_gradients(*model, oracle);
        calls.expect_each_once("in a round of two backwards");
        model->zero_grad();
        clear(oracle);
      }
    });
  }
}

// The next forward reads what hooks have stepped, also where changes are promised to be told.
TEST_P(CasesOfHooks, Case10AnOptimizerInTheBackwardIsOneBehindIt) {
  for (const auto& [offload, promised] : {std::pair(false, false), {false, true}, {true, false}}) {
    if (offload && !sharded()) continue;  // refused
    run_watched_ranks(ranks(), [&, offload = offload, promised = promised](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
      SmallNet oracle(3, kDim, Layers::oracle);
      const auto model = watched_shard(group, net, net->units(), maybe_offloaded(offload));
      if (promised) model->promise_to_tell();
      set_hooks(model->shards(), [&](std::size_t, const at::Tensor& shard) {
        integer_step({shard});
        shard.mutable_grad().reset();
        if (promised) model->weights_changed();
      });
      for (int step = 0; step < 4; ++step) {
        for (const int index : {2 * step, 2 * step + 1}) {
          const auto scope = model->microbatch(index % 2 == 1);
          small_loss(net->run(small_batch(kDim, group.rank(), index))).backward();
          oracle_backward(oracle, all_batches(kDim, ranks(), index));
        }
        for (const at::Tensor& shard : model->shards()) EXPECT_FALSE(shard.grad().defined());
        integer_step(oracle.parameters());
        clear(oracle);
      }
      expect_weights(*model, oracle);
    });
  }
}

enum class By { backward, delayed, hand };

// Of all ranks, or of the first alone: its peers have nothing to wait for.
TEST_P(CasesOfHooks, Case10AHookThatThrowsLeavesTheNextStepRight) {
  for (const By by : {By::backward, By::delayed, By::hand}) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
      SmallNet oracle(3, kDim, Layers::oracle);
      Options chosen = options();
      chosen.delay_wgrad = by == By::delayed;
      const auto model = watched_shard(group, net, net->units(), chosen);
      if (by == By::hand) model->reduce_by_hand(true);
      bool throws = false;
      std::size_t calls = 0;
      set_hooks(model->shards(), [&](std::size_t index, const at::Tensor&) {
        if (throws && index == 1) throw std::runtime_error("the hook was told to throw");
        ++calls;
      });
      for (int step = 0; step < 4; ++step) {
        throws = step == 0 || (step == 2 && group.rank() == 0);
        calls = 0;
        const at::Tensor loss = small_loss(net->run(small_batch(kDim, group.rank(), step)));
        if (by != By::backward) loss.backward();
        const auto complete = [&] {
          if (by == By::backward) loss.backward();
          if (by == By::delayed) model->backward_dw();
          if (by == By::hand) model->finish_reduces();
        };
        if (throws) {
          expect_in(thrown_text<std::exception>(complete), "told to throw");
        } else {
          complete();
        }
        EXPECT_EQ(calls, throws ? 1 : model->shards().size());
        EXPECT_TRUE(model->at_rest());
        oracle_backward(oracle, all_batches(kDim, ranks(), step));
        expect_gradients(*model, oracle);
        integer_step(model->shards());
        integer_step(oracle.parameters());
        model->zero_grad();
        clear(oracle);
      }
      expect_weights(*model, oracle);
    });
  }
}

// One of two models in a graph has a hook that throws: the other one's backward has ended all the same.
TEST_P(CasesOfHooks, Case10AHookThatThrowsLeavesOtherModelsWhole) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto other = std::make_shared<SmallNet>(2, kDim, Layers::fused, /*seed=*/70);
    const Options chosen = {.strategy = strategy(), .combine = Combine::sum};
    const auto model = watched_shard(group, net, net->units(), chosen);
    const auto second = watched_shard(group, other, other->units(), chosen);
    SmallNet oracle(2, kDim, Layers::oracle);
    SmallNet other_oracle(2, kDim, Layers::oracle, /*seed=*/70);
    bool throws = true;
    const auto act = [&](std::size_t, const at::Tensor&) {
      if (throws) throw std::runtime_error("the hook was told to throw");
    };
    set_hooks(model->shards(), act);
    set_hooks(second->shards(), act);
    for (const int step : {0, 1}) {
      throws = step == 0;
      const auto losses = [&](SmallNet& a, SmallNet& b, const at::Tensor& batch) {
        return small_loss(a.run(batch)) + small_loss(b.run(batch));
      };
      const at::Tensor loss = losses(*net, *other, small_batch(kDim, group.rank(), step));
      if (throws) {
        EXPECT_THROW(loss.backward(), std::runtime_error);
      } else {
        loss.backward();
      }
      for (const at::Tensor& batch : all_batches(kDim, ranks(), step))
        losses(oracle, other_oracle, batch).backward();
      expect_gradients(*model, oracle);
      expect_gradients(*second, other_oracle);
    }
  });
}

// By zero_grad, or by the next forward.
TEST_P(CasesOfHooks, Case10ABackwardThatIsGivenUpCallsNoHook) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(4, kDim, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), options());
    Calls calls(*model);
    for (const bool by_forward : {false, true}) {
      net->side_of = 1;
      const at::Tensor loss = small_loss(net->run(small_batch(kDim, group.rank(), 7)));
      net->side.register_hook([](const at::Tensor&) { throw std::runtime_error("half-way"); });
      EXPECT_THROW(loss.backward(), std::exception);
      net->side_of = -1;
      if (by_forward) static_cast<void>(net->run(small_batch(kDim, group.rank(), 7)));
      model->zero_grad();
      calls.expect_none("of a backward that is given up");
      SmallNet oracle(4, kDim, Layers::oracle);
      small_loss(net->run(small_batch(kDim, group.rank()))).backward();
      oracle_backward(oracle, all_batches(kDim, ranks()));
      expect_gradients(*model, oracle);
      calls.expect_each_once("in the backward after it");
      model->zero_grad();
    }
  });
}

// This rank's, whole and not yet reduced, whatever an earlier microbatch left.
TEST_P(CasesOfHooks, Case10AHookOfAFullWeightSeesTheGradientOfOneBackward) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), options());
    SmallNet oracle(2, kDim, Layers::oracle);
    SmallNet alone(2, kDim, Layers::oracle);
    std::vector<at::Tensor> seen;
    set_hooks({net->blocks[0]->up->weight},
              [&](std::size_t, const at::Tensor& weight) { seen.push_back(weight.grad().clone()); });
    trace::Recorder recorder;
    model->device().observe(&recorder);
    for (const int index : {0, 1, 2}) {
      const auto scope = model->microbatch(index == 2);
      small_loss(net->run(small_batch(kDim, group.rank(), index))).backward();
      oracle_backward(alone, {small_batch(kDim, group.rank(), index)});
      ASSERT_EQ(seen.size(), static_cast<std::size_t>(index) + 1);
      expect_same(seen.back(), alone.blocks[0]->up->weight.grad(), text("in microbatch ", index));
      clear(alone);
      oracle_backward(oracle, all_batches(kDim, ranks(), index));
    }
    model->device().unobserve(&recorder);
    EXPECT_EQ(recorder.count(OperationKind::run, "wgrad block0.up.weight"), 0U) << "it is not fused";
    expect_gradients(*model, oracle);
  });
}

}  // namespace
}  // namespace fsdpp::test::cases_hooks_test
