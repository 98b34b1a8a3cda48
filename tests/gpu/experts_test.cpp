// Experts, weights without a unit, and steps over replicas, from ranks that are GPUs.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <iostream>
#include <string>
#include <vector>

#include "fsdpp/comm/mesh_group.h"
#include "fsdpp/device/cuda.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/runtime/fully_shard.h"
#include "fsdpp/runtime/own_gradients.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/gpu/on_gpus.h"
#include "tests/support/experts_on_a_mesh.h"

namespace fsdpp::test {
namespace {

using runtime::Options;
using runtime::Strategy;

// Whole numbers: what bf16 has too.
bool train_experts(comm::PeerGroup& group, Form form, at::ScalarType dtype, const Options& options) {
  const auto net = std::make_shared<ExpertNet>(form, Layers::fused);
  const auto model = fully_shard(group, net, std::vector{net->experts}, options,
                                 device::make_cuda_device(group.lanes().gpu(), {.poison = true}));
  ExpertNet oracle(form, Layers::oracle);
  bool right = true;
  for (int step = 0; step < 3; ++step) {
    for (const int index : {2 * step, 2 * step + 1}) {
      const auto scope = model->microbatch(index % 2 == 1);
      backward(*net, group.rank(), index, on(group, dtype));
      model->backward_dw();
      for (int rank = 0; rank < group.ranks(); ++rank) backward(oracle, rank, index);
    }
    right = same(*model, oracle,
                 text(runtime::to_string(options.strategy), form == Form::one ? ", one weight" : ", a list",
                      ", ", c10::toString(dtype), options.delay_wgrad ? ", delayed" : "",
                      options.late_group_elements == 0 ? ", late" : "", ", step ", step)) &&
            right;
    model->zero_grad(step % 2 == 0);
    for (at::Tensor weight : oracle.parameters()) weight.mutable_grad().reset();
  }
  return right;
}

const RegisterGpuBody experts("experts", [](comm::PeerGroup& group) {
  bool right = true;
  int count = 0;
  for (const Strategy strategy : runtime::kStrategies) {
    for (const Form form : {Form::one, Form::list}) {
      for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
        for (const bool delayed : {false, true}) {
          for (const bool late : {false, true}) {
            if (late && !shards_gradients(strategy)) continue;
            Options options{.strategy = strategy,
                            .combine = runtime::Combine::sum,
                            .late_group_elements = late ? 0 : -1,
                            .delay_wgrad = delayed};
            if (dtype != at::kFloat) options.model_dtype = dtype;
            right = train_experts(group, form, dtype, options) && right;
            ++count;
          }
        }
      }
    }
  }
  if (group.rank() == 0) std::cout << "configurations of experts " << count << "\n";
  return right;
});

const RegisterGpuBody own("own_gradients", [](comm::PeerGroup& group) {
  const auto lanes = device::make_cuda_device(group.lanes().gpu(), {});
  const at::TensorOptions place = on(group, at::kBFloat16);
  const at::Tensor weight = at::full({8, 16}, 1.0, place).requires_grad_();
  const at::Tensor expert = at::full({2, 8, 16}, 1.0, place).requires_grad_();
  const runtime::OwnGradients gradients({weight, expert});
  for (const double value : {256.0, 1.0}) {
    const at::Tensor input = at::full({1, 16}, value, place);
    nn::fused_linear(input, weight).sum().backward();
    nn::grouped_linear(input, expert, at::tensor({1, 1}, at::kInt).to(place.device())).sum().backward();
  }
  const at::Tensor sums = expert.grad().cpu();
  return weight.grad().scalar_type() == at::kFloat && weight.grad().eq(257).all().item<bool>() &&
         sums[0].eq(257).all().item<bool>() && sums[1].eq(0).all().item<bool>();
});

// Experts on a mesh of their own: sums and means over all ranks, of which half hold an expert.
const RegisterGpuBody experts_on_a_mesh("experts_on_a_mesh", [](comm::PeerGroup& group) {
  const int ranks = group.ranks();
  const int which = group_of(group.rank(), ranks);
  comm::MeshGroup mesh(group, mesh_of_experts(ranks));
  bool right = true;
  int count = 0;
  for (const Strategy strategy : runtime::kStrategies) {
    for (const bool mean : {false, true}) {
      const auto own = std::make_shared<OwnExperts>(which);
      const Options options{.strategy = strategy,
                            .combine = mean ? runtime::Combine::mean : runtime::Combine::sum};
      const auto model = fully_shard(mesh, own, std::vector<std::shared_ptr<torch::nn::Module>>{}, options,
                                     device::make_cuda_device(group.lanes().gpu(), {.poison = true}));
      Experts oracle(Form::list, /*oracle=*/true);
      for (int step = 0; step < 3; ++step) {
        backward_of_own(*own, group.rank(), ranks, step, on(group, at::kFloat));
        backward_of_all(oracle, ranks, step);
        const at::Tensor gradient = model->full_gradients()[0].cpu();
        for (int e = 0; e < kOwnExperts; ++e) {
          const at::Tensor sum = oracle.of(kOwnExperts * which + e).grad();
          if (gradient[e].equal(mean ? sum / ranks : sum)) continue;
          std::cerr << runtime::to_string(strategy) << (mean ? ", mean" : ", sum") << ", step " << step
                    << ": expert " << e << " is wrong\n";
          right = false;
        }
        model->zero_grad();
        for (at::Tensor weight : oracle.parameters()) weight.mutable_grad().reset();
      }
      ++count;
    }
  }
  if (group.rank() == 0) std::cout << "configurations of experts " << count << "\n";
  return right;
});

using Choices = std::vector<runtime::UnitChoice>;

// AdamW with clipping: what one process does, in fp32. `choices`: of the two blocks.
bool steps_like_one_process(comm::PeerGroup& group, comm::MeshGroup& replicas, const Options& options,
                            bool hybrid, const Choices& choices = Choices(2)) {
  const auto net = std::make_shared<SmallNet>(2, kExpertDim, Layers::fused);
  std::vector<runtime::UnitSpec> units;
  for (const auto& block : net->units())
    units.push_back({.modules = {block}, .choice = choices[units.size()]});
  const bool narrow = choices[0].accumulation_dtype == at::kBFloat16;
  auto lanes = device::make_cuda_device(group.lanes().gpu(), {.poison = true});
  const auto model = hybrid ? fully_shard(replicas, net, units, options, std::move(lanes))
                            : fully_shard(group, net, units, options, std::move(lanes));
  optim::AdamW adamw(*model, {});
  SmallNet oracle(2, kExpertDim, Layers::oracle);
  std::vector<at::Tensor> weights = oracle.parameters();
  std::vector<at::Tensor> first, second, counts;
  for (const at::Tensor& weight : weights) {
    first.push_back(at::zeros_like(weight));
    second.push_back(at::zeros_like(weight));
    counts.push_back(at::zeros({}));
  }
  bool right = true;
  for (int step = 0; step < 5; ++step) {
    const at::Tensor input = small_batch(kExpertDim, group.rank(), step).to(on(group, at::kFloat));
    const at::Tensor output = net->run(input);
    at::sum(output * integers(output.sizes(), 5).to(output.device())).backward();
    for (int rank = 0; rank < group.ranks(); ++rank)
      small_loss(oracle.run(small_batch(kExpertDim, rank, step))).backward();
    double squares = 0;
    for (const at::Tensor& weight : weights)
      squares += weight.grad().to(at::kDouble).pow(2).sum().item<double>();
    const double norm = std::sqrt(squares);
    const double got = adamw.step(0.01, norm / 2).item<double>();
    right = right && std::abs(got - norm) < (narrow ? 5e-3 : 1e-5) * norm;
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> clipped;
    for (at::Tensor& count : counts) count.add_(1);
    for (at::Tensor& weight : weights) clipped.push_back(weight.grad() * (norm / 2 / (norm + 1e-6)));
    at::_fused_adamw_(weights, clipped, first, second, {}, counts, 0.01, 0.9, 0.999, 0.01, 1e-8, false,
                      false);
    model->zero_grad();
    for (at::Tensor& weight : weights) weight.mutable_grad().reset();
  }
  const std::vector<at::Tensor> whole = model->full_weights();
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const std::string name = model->parameters()[i].first;
    if (at::allclose(whole[i].cpu(), oracle.named_parameters()[name], 1e-3, 1e-3)) continue;
    std::cerr << runtime::to_string(options.strategy) << (hybrid ? ", hybrid: " : ": ") << name
              << " is wrong\n";
    right = false;
  }
  return right;
}

const RegisterGpuBody steps("steps", [](comm::PeerGroup& group) {
  comm::MeshGroup replicas(group, comm::hybrid_mesh(group.ranks(), 2));
  bool right = true;
  for (const Strategy strategy : runtime::kStrategies) {
    Options options{.strategy = strategy, .combine = runtime::Combine::sum};
    right = steps_like_one_process(group, replicas, options, false) && right;
    right = steps_like_one_process(group, replicas, options, true) && right;
    options.shard_optimizer_over_replicas = shards_optimizer(strategy);
    if (options.shard_optimizer_over_replicas)
      right = steps_like_one_process(group, replicas, options, true) && right;
  }
  // Whole units beside sharded ones count once; gradients in bf16 are stepped by ATen's kernel.
  const Options options{.combine = runtime::Combine::sum};
  for (const bool hybrid : {false, true}) {
    const Choices mixed = {{.strategy = Strategy::no_shard}, {.strategy = Strategy::optim}};
    right = steps_like_one_process(group, replicas, options, hybrid, mixed) && right;
  }
  if (group.lanes().collectives() != nullptr) return right;
  const Choices narrow = {{.strategy = Strategy::no_shard, .accumulation_dtype = at::kBFloat16}, {}};
  return steps_like_one_process(group, replicas, options, false, narrow) && right;
});

class GpuBodies : public testing::TestWithParam<std::tuple<const char*, int, const char*>> {};

TEST_P(GpuBodies, GiveWhatOneProcessGives) {
  const auto [body, ranks, via] = GetParam();
  if (const std::string why = no_gpus_for(ranks, via); !why.empty()) GTEST_SKIP() << why;
  record_figure("parity_configurations", run_on_gpus(body, ranks, {{"FSDPP_TEST_VIA", via}}),
                "configurations of experts ");
}

using Body = std::tuple<const char*, int, const char*>;

std::vector<Body> bodies() {
  std::vector<Body> all = {{"own_gradients", 1, "peers"}, {"experts", 1, "peers"}};
  for (const int ranks : {2, 4, 8}) {
    for (const char* via : {"peers", "nccl"}) {
      for (const char* body : {"experts", "experts_on_a_mesh", "steps"}) all.emplace_back(body, ranks, via);
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Experts, GpuBodies, testing::ValuesIn(bodies()), [](const auto& info) {
  return text(std::get<0>(info.param), "_", std::get<1>(info.param), "_", std::get<2>(info.param));
});

}  // namespace
}  // namespace fsdpp::test
