// Experts: grouped layers with a fused weight gradient, and parameters on a mesh of their own.
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <cmath>
#include <map>

#include "fsdpp/comm/mesh_group.h"
#include "fsdpp/nn/grouped_linear.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/clip.h"
#include "fsdpp/trace/recorder.h"
#include "tests/support/experts_on_a_mesh.h"
#include "tests/support/gate_device.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::cases_experts_test {
namespace {

using device::Operation;
using device::OperationKind;

constexpr int64_t kDim = kExpertDim;

class CasesOfExperts : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Strategies, CasesOfExperts, all_ranks(), parameters_name);

TEST_P(CasesOfExperts, Case21GroupedWeightsGiveOneProcesssGradients) {
  for (const Form form : {Form::one, Form::list}) {
    for (const bool delayed : {false, true}) {
      run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
        const auto net = std::make_shared<ExpertNet>(form, Layers::fused);
        Options chosen = options();
        chosen.delay_wgrad = delayed;
        const auto model = watched_shard(group, net, std::vector{net->experts}, chosen);
        ExpertNet oracle(form, Layers::oracle);
        for (int step = 0; step < 4; ++step) {
          for (const int index : {2 * step, 2 * step + 1}) {
            const auto scope = model->microbatch(index % 2 == 1);
            backward(*net, group.rank(), index);
            model->backward_dw();
            for (int rank = 0; rank < ranks(); ++rank) backward(oracle, rank, index);
          }
          expect_gradients(*model, oracle);
          model->zero_grad(step % 2 == 0);
          clear(oracle);
        }
      });
    }
  }
}

// What experts' gradients are summed in has the accumulation dtype, also where the layer finds no sink and
// hands its gradient to autograd: which the schedule shows.
TEST_P(CasesOfExperts, Case21Bf16MicrobatchesAddInFp32AlsoWithoutASink) {
  for (const Form form : {Form::one, Form::list}) {
    for (const bool fused : {true, false}) {
      run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
        const auto experts = std::make_shared<Experts>(form, /*oracle=*/false);
        experts->to(at::kBFloat16);
        Options chosen = options();
        chosen.fused = fused;
        const auto model = watched_shard(group, experts, std::vector<std::shared_ptr<Experts>>{}, chosen);
        trace::Recorder recorder;
        model->device().observe(&recorder);
        const at::Tensor rows = at::ones({3, kDim}, at::kBFloat16);
        const at::Tensor ends = ends_of({1, 1, 0, 1});
        for (const double gradient : {256, 1}) {
          const auto scope = model->microbatch(gradient == 1);
          (at::sum(fsdpp::call(*experts, rows, ends)) * gradient).backward();
        }
        model->device().unobserve(&recorder);
        const std::vector<at::Tensor> gradients = model->full_gradients();
        for (int e = 0; e < kExperts; ++e) {
          const at::Tensor& found =
              form == Form::one ? gradients[0][e] : gradients[static_cast<std::size_t>(e)];
          expect_same(found, at::full({kDim, kDim}, e == 2 ? 0 : 257 * ranks(), at::kFloat),
                      text("expert ", e));
        }
        EXPECT_EQ(recorder.count(OperationKind::run, "grad ") > 0, !fused);
        const std::size_t written =
            recorder.count(OperationKind::run, "wgrad ") + recorder.count(OperationKind::run, "late wgrad ");
        EXPECT_EQ(written > 0, fused);
      });
    }
  }
}

// Nothing but the slot is written: the grouped product's output lies in the reduce's input.
TEST_P(CasesOfExperts, Case20AGroupedLayerWritesIntoTheReducesInput) {
  for (const Form form : {Form::one, Form::list}) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      auto lanes = std::make_unique<GateDevice>();
      ByteRange slot;
      std::vector<ByteRange> written;
      lanes->before = [&](const Operation& operation) {
        if (operation.kind == OperationKind::acquire && operation.name == "slot experts")
          slot = operation.writes[0];
        if (operation.name.starts_with("wgrad experts.")) written.push_back(operation.writes.at(0));
      };
      const auto net = std::make_shared<ExpertNet>(form, Layers::fused);
      Options all_in_slots = options();
      all_in_slots.late_group_elements = -1;
      const auto model = watched_shard(group, net, std::vector{net->experts}, all_in_slots, std::move(lanes));
      backward(*net, group.rank(), 1);
      ASSERT_EQ(written.size(), net->experts->weights.size()) << "each weight once";
      for (const ByteRange& range : written) {
        const auto* first = static_cast<const std::byte*>(range.begin);
        const auto* begin = static_cast<const std::byte*>(slot.begin);
        EXPECT_TRUE(first >= begin && first + range.size <= begin + slot.size);
      }
    });
  }
}

TEST(ExpertsAlone, WhatDoesNotFitIsRefusedByName) {
  const at::Tensor weight = integers({2, 3, 4}, 1);
  const at::Tensor rows = integers({5, 4}, 2);
  const auto refused = [&](const at::Tensor& input, const at::Tensor& ends) {
    return thrown_text([&] { static_cast<void>(nn::grouped_linear(input, weight, ends)); });
  };
  expect_in(refused(rows, at::tensor({2, 4}, at::kInt)), "end at 4, but the input has 5 rows");
  expect_in(refused(rows, at::tensor({3, 2}, at::kInt)), "offsets[1] = 2 after 3");
  expect_in(refused(rows, at::tensor({2, 5}, at::kLong)), "expected one int32 per expert");
  expect_in(refused(rows, at::tensor({5}, at::kInt)), "for 2 experts");
  expect_in(refused(integers({5, 3}, 2), at::tensor({2, 5}, at::kInt)), "of the input's width and dtype");
}

// Half of the ranks share each pair of experts; all have the dense part together.
constexpr std::array<int, 3> kRanks = {2, 4, 8};

// Half of the ranks hold an expert, all have rows for it. Close to one another are the mean over all and the
// mean over half as well, when gradients are small: so the ratio is compared.
void expect_ratio_to_sum(int ranks) {
  for (const Strategy strategy : runtime::kStrategies) {
    for (const bool mean : {false, true}) {
      run_watched_ranks(ranks, [&](comm::PeerGroup& group) {
        comm::MeshGroup mesh(group, mesh_of_experts(ranks));
        const int which = group_of(group.rank(), ranks);
        const auto own = std::make_shared<OwnExperts>(which);
        const auto experts = watched_shard(
            mesh, own, std::vector<std::shared_ptr<torch::nn::Module>>{},
            Options{.strategy = strategy, .combine = mean ? runtime::Combine::mean : runtime::Combine::sum});
        Experts oracle(Form::list, /*oracle=*/true);
        for (int step = 0; step < 3; ++step) {
          backward_of_own(*own, group.rank(), ranks, step);
          backward_of_all(oracle, ranks, step);
          const at::Tensor gradient = experts->full_gradients()[0];
          for (int e = 0; e < kOwnExperts; ++e) {
            const at::Tensor sum = oracle.of(kOwnExperts * which + e).grad();
            const double ratio =
                at::sum(gradient[e] * sum).item<double>() / at::sum(sum * sum).item<double>();
            EXPECT_EQ(ratio, mean ? 1.0 / ranks : 1.0);
            expect_same(gradient[e], sum * ratio, text("expert ", e, " in step ", step));
          }
          experts->zero_grad();
          clear(oracle);
        }
      });
    }
  }
}

TEST(ExpertsOnAMesh, Case12TheRatioToTheSumIsOneOverAllRanks) {
  for (const int ranks : kRanks) expect_ratio_to_sum(ranks);
}

void expect_steps_of_one_process(int ranks) {
  for (const Strategy strategy : runtime::kStrategies) {
    run_watched_ranks(ranks, [&](comm::PeerGroup& group) {
      comm::MeshGroup mesh(group, mesh_of_experts(ranks));
      const int which = group_of(group.rank(), ranks);
      const auto dense = std::make_shared<SmallNet>(2, kDim, Layers::fused);
      const auto own = std::make_shared<OwnExperts>(which);
      const Options options{.strategy = strategy};  // means: over all ranks
      const auto experts =
          watched_shard(mesh, own, std::vector<std::shared_ptr<torch::nn::Module>>{}, options);
      const auto model = watched_shard(group, dense, dense->units(), options);
      optim::AdamW adamw(std::vector<ShardedModel*>{model.get(), experts.get()}, {});

      SmallNet oracle(2, kDim, Layers::oracle);
      Experts oracle_experts(Form::list, /*oracle=*/true);
      std::vector<at::Tensor> weights = oracle.parameters();
      const auto its = oracle_experts.parameters();
      weights.insert(weights.end(), its.begin(), its.end());
      std::vector<at::Tensor> first, second, steps;
      for (const at::Tensor& weight : weights) {
        first.push_back(at::zeros_like(weight));
        second.push_back(at::zeros_like(weight));
        steps.push_back(at::zeros({}));
      }
      int64_t held = 0;
      for (int step = 0; step < 50; ++step) {
        SCOPED_TRACE(text(runtime::to_string(strategy), ", rank ", group.rank(), ", step ", step));
        small_loss(dense->run(small_batch(kDim, group.rank(), step))).backward();
        backward_of_own(*own, group.rank(), ranks, step);
        for (int rank = 0; rank < ranks; ++rank)
          (small_loss(oracle.run(small_batch(kDim, rank, step))) / ranks).backward();
        backward_of_all(oracle_experts, ranks, step, 1.0 / ranks);
        double squares = 0;
        for (const at::Tensor& weight : weights)
          squares += weight.grad().to(at::kDouble).pow(2).sum().item<double>();
        const double norm = std::sqrt(squares);
        const std::vector<at::Tensor> gradients = experts->full_gradients();
        for (int e = 0; e < kOwnExperts; ++e) {
          EXPECT_TRUE(
              at::allclose(gradients[0][e], oracle_experts.of(kOwnExperts * which + e).grad(), 1e-4, 1e-4));
        }
        const double max_norm = norm / 2;
        EXPECT_NEAR(adamw.step(0.01, max_norm).item<double>(), norm, 1e-6 * norm);
        const at::NoGradGuard no_grad;
        for (at::Tensor& count : steps) count.add_(1);
        std::vector<at::Tensor> clipped;
        for (at::Tensor& weight : weights) clipped.push_back(weight.grad() * (max_norm / (norm + 1e-6)));
        at::_fused_adamw_(weights, clipped, first, second, {}, steps, 0.01, 0.9, 0.999, 0.01, 1e-8, false,
                          false);
        model->zero_grad();
        experts->zero_grad();
        clear(oracle);
        clear(oracle_experts);
        const int64_t now = model->memory().current() + experts->memory().current();
        if (step == 4) held = now;
        EXPECT_TRUE(step < 4 || now == held) << "memory grows: " << held << " to " << now;
      }
      const at::Tensor trained = experts->full_weights()[0];
      for (int e = 0; e < kOwnExperts; ++e)
        EXPECT_TRUE(at::allclose(trained[e], oracle_experts.of(kOwnExperts * which + e), 1e-3, 1e-3));
      const std::vector<at::Tensor> whole = model->full_weights();
      for (std::size_t i = 0; i < whole.size(); ++i) {
        const at::Tensor* expected = oracle.named_parameters().find(model->parameters()[i].first);
        EXPECT_TRUE(at::allclose(whole[i], *expected, 1e-3, 1e-3)) << model->parameters()[i].first;
      }
    });
  }
}

TEST(ExpertsOnAMesh, Case12And26MeansNormsAndStepsCountEachParameterOnce) {
  for (const int ranks : kRanks) expect_steps_of_one_process(ranks);
}

TEST(ExpertsOnAMesh, AModelAroundThemLeavesThemOut) {
  run_watched_ranks(2, [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<ExpertNet>(Form::one, Layers::fused);
    Options halves = sharded_sum();
    halves.divisor = 2;
    const auto experts =
        watched_shard(group, net->experts, std::vector<std::shared_ptr<torch::nn::Module>>{}, halves);
    const auto model =
        watched_shard(group, net, std::vector<std::shared_ptr<torch::nn::Module>>{}, sharded_sum());
    EXPECT_EQ(model->parameters().size(), 4U);
    EXPECT_EQ(experts->parameters().size(), 1U);
    ExpertNet oracle(Form::one, Layers::oracle);
    for (int step = 1; step < 4; ++step) {
      backward(*net, group.rank(), step);
      for (int rank = 0; rank < 2; ++rank) backward(oracle, rank, step);
      expect_same(experts->full_gradients()[0] * 2, oracle.experts->weights[0].grad(),
                  "the divisor of experts");
      for (const auto& [name, sizes] : model->parameters()) EXPECT_FALSE(name.starts_with("experts"));
      expect_gradients(*model, oracle);
      model->zero_grad();
      experts->zero_grad();
      clear(oracle);
    }
    halves.divisor = 0;
    const auto other = std::make_shared<ExpertNet>(Form::one, Layers::fused);
    expect_in(thrown_text([&] { static_cast<void>(fully_shard(group, other, other->children(), halves)); }),
              "divisor = 0");
  });
}

}  // namespace
}  // namespace fsdpp::test::cases_experts_test
