// Units with strategies, dtypes and outputs of their own.
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <set>
#include <stdexcept>
#include <vector>

#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/clip.h"
#include "fsdpp/trace/recorder.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::unit_choices_test {
namespace {

using device::OperationKind;
using runtime::MainWeights;
using runtime::UnitChoice;
using runtime::UnitSpec;

constexpr int64_t kDim = 8;

std::vector<UnitSpec> with_choices(const SmallNet& net, const std::vector<UnitChoice>& choices) {
  std::vector<UnitSpec> specs;
  for (const auto& unit : net.units())
    specs.push_back({.modules = {unit}, .choice = choices.at(specs.size())});
  return specs;
}

// The gradients are the oracle's; both step, and tell.
void end_step(ShardedModel& model, SmallNet& oracle) {
  expect_gradients(model, oracle);
  integer_step(model.shards());
  integer_step(oracle.parameters());
  model.weights_changed();
  model.zero_grad();
  clear(oracle);
}

// One linear layer with one weight [1, 2]: its gradient is the sum of its inputs.
class OneWeight : public torch::nn::Module {
 public:
  explicit OneWeight(at::ScalarType dtype) : weight(register_parameter("weight", at::ones({1, 2}, dtype))) {}
  [[nodiscard]] at::Tensor forward(const at::Tensor& input) const {
    return nn::fused_linear(input, weight, {}).sum();
  }
  at::Tensor weight;
};

TEST(UnitChoices, EachUnitTalksAsItsStrategySays) {
  const std::vector<UnitChoice> choices = {{.strategy = Strategy::no_shard},
                                           {.strategy = Strategy::optim},
                                           {.strategy = Strategy::optim_grads},
                                           {.strategy = Strategy::optim_grads_params}};
  constexpr int64_t kMicrobatches = 3;
  run_watched_ranks(2, [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(4, kDim, Layers::fused);
    const auto model = watched_shard(group, net, with_choices(*net, choices), {.strategy = Strategy::optim});
    SmallNet oracle(4, kDim, Layers::oracle);
    trace::Recorder recorder;
    for (int step = 0; step < 4; ++step) {
      if (step == 3) model->device().observe(&recorder);
      for (int i = 0; i < kMicrobatches; ++i) {
        const auto scope = model->microbatch(i + 1 == kMicrobatches);
        small_loss(net->run(small_batch(kDim, group.rank(), i))).backward();
        for (const at::Tensor& batch : all_batches(kDim, 2, i))
          (small_loss(oracle.run(batch)) / 2).backward();
      }
      expect_gradients(*model, oracle);
      integer_step(model->shards());
      integer_step(oracle.parameters());
      model->zero_grad();
      clear(oracle);
    }
    model->device().unobserve(&recorder);
    const auto units = model->units();
    const std::vector<int64_t> reduces = {1, 1, 1, kMicrobatches, kMicrobatches};  // the root's comes first
    // Of an all-reduce the second half; and the last unit stays from a forward to its backward.
    const std::vector<int64_t> gathers = {1, 1, 1, 1, kMicrobatches};
    for (std::size_t i = 0; i < units.size(); ++i) {
      const auto count = [&](OperationKind kind, const std::string& what) {
        return static_cast<int64_t>(recorder.count(kind, what + units[i].name));
      };
      EXPECT_EQ(count(OperationKind::signal, "ready "), reduces[i]) << units[i].name;
      EXPECT_EQ(count(OperationKind::copy, "gather "), gathers[i]) << units[i].name;
    }
  });
}

TEST(UnitChoices, EachUnitHasTheDtypesItAsksFor) {
  const std::vector<UnitChoice> choices = {
      {},
      {.model_dtype = at::kBFloat16, .output_dtype = at::kFloat},
      {.model_dtype = at::kBFloat16,
       .main_weights = MainWeights::model_dtype,
       .accumulation_dtype = at::kBFloat16,
       .output_dtype = at::kFloat},
      {.strategy = Strategy::optim, .main_weights = MainWeights::model_dtype},
  };
  for (const Strategy strategy : runtime::kStrategies) {
    run_watched_ranks(2, [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(4, kDim, Layers::fused);
      const auto model = watched_shard(group, net, with_choices(*net, choices),
                                       {.strategy = strategy, .output_dtype = at::kDouble});
      for (const auto& block : net->blocks) block->casts_input = true;
      const at::Tensor logits = net->run(small_batch(kDim, group.rank()));
      EXPECT_EQ(logits.scalar_type(), at::kDouble);
      small_loss(logits).backward();
      const auto names = model->parameters();
      const auto shards = model->shards();
      const auto weights = model->full_weights();
      for (std::size_t i = 0; i < names.size(); ++i) {
        const std::string& name = names[i].first;
        const bool second = name.starts_with("block1.");
        const bool third = name.starts_with("block2.");
        const auto narrow = [](bool when) { return when ? at::kBFloat16 : at::kFloat; };
        EXPECT_EQ(weights[i].scalar_type(), narrow(second || third)) << name;
        EXPECT_EQ(shards[i].scalar_type(), narrow(third)) << name;
        EXPECT_EQ(shards[i].grad().scalar_type(), narrow(third)) << name;
      }
    });
  }
}

// In bf16 256 + 1 + 1 is 256 when it rounds twice, and 258 when it rounds once.
TEST(UnitChoices, Case03RanksAreSummedInFp32AndRoundedOnce) {
  for (const Strategy strategy : runtime::kStrategies) {
    run_watched_ranks(4, [&](comm::PeerGroup& group) {
      const auto module = std::make_shared<OneWeight>(at::kBFloat16);
      const auto model =
          watched_shard(group, module, std::vector<std::shared_ptr<torch::nn::Module>>{},
                        {.strategy = strategy, .combine = Combine::sum, .accumulation_dtype = at::kBFloat16});
      const std::array<double, 4> values = {256, 1, 1, 0};
      for (int step = 0; step < 2; ++step) {
        const double own = values.at(static_cast<std::size_t>(group.rank()));
        call(*module, at::full({1, 2}, own, at::kBFloat16)).backward();
        expect_same(model->full_gradients().at(0), at::full({1, 2}, 258.0), runtime::to_string(strategy));
        model->zero_grad();
      }
    });
  }
}

// 256 and 1 make 257 but in bf16, which has no 257; ranks are summed in fp32 all the same.
TEST(UnitChoices, Case02AccumulationDtypeIsWhatMicrobatchesAddUpIn) {
  for (const Strategy strategy : runtime::kStrategies) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      run_watched_ranks(2, [&](comm::PeerGroup& group) {
        const auto module = std::make_shared<OneWeight>(at::kBFloat16);
        const Options options{.strategy = strategy, .combine = Combine::sum, .accumulation_dtype = dtype};
        const auto model =
            watched_shard(group, module, std::vector<std::shared_ptr<torch::nn::Module>>{}, options);
        for (int step = 0; step < 2; ++step) {
          for (const double value : {256.0, 1.0}) {
            const auto scope = model->microbatch(value == 1.0);
            call(*module, at::full({1, 2}, value, at::kBFloat16)).backward();
          }
          const bool narrow = dtype == at::kBFloat16;
          // Sharded gradients get the ranks' sums: 512, and 514, which is 512 and 2 in bf16 too: 512 + 2
          // rounds.
          const double expected = narrow ? 512 : 514;
          for (const at::Tensor& gradient : model->full_gradients())
            expect_same(gradient, at::full({1, 2}, expected), runtime::to_string(strategy));
          model->zero_grad(step == 0);
        }
      });
    }
  }
}

// Norms count what several ranks hold as a whole once, and clipping scales it on each of them.
TEST(UnitChoices, Case34ANormCountsAnUnshardedUnitOnce) {
  const std::vector<UnitChoice> choices = {
      {.strategy = Strategy::no_shard}, {}, {.strategy = Strategy::optim}};
  for (const int replicas : {1, 2}) {
    run_watched_ranks(4, [&](comm::PeerGroup& group) {
      comm::MeshGroup mesh(group, comm::hybrid_mesh(4, replicas));
      const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
      const auto model = watched_shard(mesh, net, with_choices(*net, choices), {.combine = Combine::sum});
      SmallNet oracle(3, kDim, Layers::oracle);
      small_loss(net->run(small_batch(kDim, group.rank()))).backward();
      oracle_backward(oracle, all_batches(kDim, 4));
      double squares = 0;
      for (const at::Tensor& weight : oracle.parameters())
        squares += weight.grad().to(at::kDouble).square().sum().item<double>();
      const double norm = optim::clip_grad_norm(*model, 0.5, 2);
      EXPECT_NEAR(norm, std::sqrt(squares), 1e-9 * norm);
      const auto gradients = model->full_gradients();
      const auto expected = oracle.parameters();
      for (std::size_t i = 0; i < gradients.size(); ++i)
        EXPECT_TRUE(at::allclose(gradients[i], expected[i].grad() * (0.5 / norm), 1e-5, 1e-7)) << i;
    });
  }
}

// AdamW computes in fp32 with fp32 moments, and rounds what it stores.
TEST(UnitChoices, AdamwUpdatesMainWeightsInTheModelsDtype) {
  for (const Strategy strategy : runtime::kStrategies) {
    for (const at::ScalarType accumulation : {at::kFloat, at::kBFloat16}) {
      run_watched_ranks(2, [&](comm::PeerGroup& group) {
        const auto module = std::make_shared<OneWeight>(at::kBFloat16);
        const auto model = watched_shard(group, module, std::vector<std::shared_ptr<torch::nn::Module>>{},
                                         {.strategy = strategy,
                                          .combine = Combine::sum,
                                          .main_weights = MainWeights::model_dtype,
                                          .accumulation_dtype = accumulation});
        optim::AdamW adamw(*model, {});
        std::vector<at::Tensor> weight = {at::ones({1, 2}, at::kBFloat16)};
        std::vector<at::Tensor> first = {at::zeros({1, 2})};
        std::vector<at::Tensor> second = {at::zeros({1, 2})};
        std::vector<at::Tensor> steps = {at::zeros({}, at::kFloat)};
        for (int step = 0; step < 3; ++step) {
          call(*module, at::full({1, 2}, 3.0 + step, at::kBFloat16)).backward();
          std::vector<at::Tensor> gradient = {at::full({1, 2}, 2 * (3.0 + step))};
          std::vector<at::Tensor> wide = {weight[0].to(at::kFloat)};
          steps[0].add_(1);
          const optim::AdamWOptions options;
          at::_fused_adamw_(wide, gradient, first, second, {}, steps, 0.125, options.beta1, options.beta2,
                            options.weight_decay, options.eps, false, false);
          weight[0] = wide[0].to(at::kBFloat16);
          static_cast<void>(adamw.step(0.125));
          model->zero_grad();
          expect_same(model->full_weights().at(0), weight[0], text("step ", step));
          EXPECT_EQ(adamw.state_bytes(), 2 * 4 * model->shards().at(0).numel()) << "moments are fp32";
        }
      });
    }
  }
}

// The first gather of a step is from all ranks, later ones from neighbours; a unit that the forward left out
// is kept all the same, so that nobody waits in vain.
TEST(UnitChoices, WeightsThatNeighboursKeepComeFromThem) {
  run_watched_ranks(4, [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const std::vector<UnitChoice> choices = {
        {.reshard_after_forward = 2}, {.reshard_after_forward = false}, {.reshard_after_forward = 2}};
    const auto model = watched_shard(group, net, with_choices(*net, choices), {.combine = Combine::sum});
    model->promise_to_tell();
    SmallNet oracle(3, kDim, Layers::oracle);
    const int64_t kept = model->memory().by_purpose().at("weights kept for neighbours");
    EXPECT_EQ(kept, (model->units()[1].bytes + model->units()[3].bytes) / 2);
    trace::Recorder recorder;
    for (int step = 0; step < 5; ++step) {
      const auto skipped = [&](int rank) {
        const bool skips =
            step >= 1 && step < 3 && rank == 1;  // from the second time on nobody gathers it ahead
        return skips ? std::set<int>{0} : std::set<int>{};
      };
      net->skipped = skipped(group.rank());
      if (step == 4) model->device().observe(&recorder);
      for (int i = 0; i < 2; ++i) {
        const auto scope = model->microbatch(i == 1);
        small_loss(net->run(small_batch(kDim, group.rank(), i))).backward();
        for (int rank = 0; rank < 4; ++rank) {
          oracle.skipped = skipped(rank);
          small_loss(oracle.run(small_batch(kDim, rank, i))).backward();
        }
      }
      end_step(*model, oracle);
      if (step == 1) {  // gathered from all: an epoch in which nobody keeps, until training goes on
        const at::NoGradGuard no_grad;
        oracle.skipped.clear();
        net->skipped.clear();
        expect_same(net->run(small_batch(kDim, 0)), oracle.run(small_batch(kDim, 0)), "evaluation");
      }
    }
    model->device().unobserve(&recorder);
    const auto count = [&](const std::string& what) {
      return static_cast<int>(recorder.count(OperationKind::copy, what));
    };
    // Two microbatches; the last unit stays from a forward to its backward.
    EXPECT_EQ(count("keep "), 2);
    EXPECT_EQ(count("gather block0 of neighbours"), 3);
    EXPECT_EQ(count("gather block0"), 4);
    EXPECT_EQ(count("gather block1"), 1);
    EXPECT_EQ(count("gather block2 of neighbours"), 1);
    EXPECT_EQ(count("gather block2"), 2);
  });
}

// Each rank's forward breaks off at another unit: parts are kept as often on all of them.
TEST(UnitChoices, Case30AForwardThatRaisesLeavesNeighboursInStep) {
  for (const bool promised : {false, true}) {
    run_watched_ranks(4, [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
      const auto model =
          watched_shard(group, net, net->units(), {.combine = Combine::sum, .reshard_after_forward = 2});
      if (promised) model->promise_to_tell();
      SmallNet oracle(3, kDim, Layers::oracle);
      for (int step = 0; step < 4; ++step) {
        if (step % 2 == 1) {
          SmallBlock& broken = *net->blocks.at(static_cast<std::size_t>(group.rank() % 3));
          broken.raises = true;
          EXPECT_THROW(net->run(small_batch(kDim, group.rank())), std::runtime_error);
          broken.raises = false;
          model->zero_grad();
        }
        small_loss(net->run(small_batch(kDim, group.rank(), step))).backward();
        oracle_backward(oracle, all_batches(kDim, 4, step));
        end_step(*model, oracle);
      }
    });
  }
}

TEST(UnitChoices, Case22WhatAUnitCannotHaveNamesTheUnit) {
  run_watched_ranks(2, [](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const std::vector<UnitChoice> choices = {{}, {.strategy = Strategy::no_shard}};
    const std::string error = thrown_text(
        [&] { static_cast<void>(fully_shard(group, net, with_choices(*net, choices), {.offload = true})); });
    expect_in(error, "no_shard (unit block1)");
    expect_in(error, "offload");
  });
}

}  // namespace
}  // namespace fsdpp::test::unit_choices_test
