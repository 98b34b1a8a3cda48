// AdamW on shards against torch.optim.AdamW's documented update, written out in fp64.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/runtime/call.h"
#include "fsdpp/runtime/fully_shard.h"
#include "tests/support/hazard_watch.h"

namespace fsdpp {
namespace {

using runtime::Strategy;
using test::run_watched_ranks;
using test::watched_shard;

constexpr int kSteps = 10;
constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.95;
constexpr double kEps = 1e-6;
constexpr double kDecay = 0.1;

at::Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed),
                   at::TensorOptions().dtype(at::kFloat));
}

double rate_of(int step) { return 0.01 / (1 + step); }

// Odd sizes, some with fewer elements than ranks: most ranks hold empty shards of those.
const std::vector<std::vector<int64_t>>& sizes() {
  static const std::vector<std::vector<int64_t>> all = {{33, 5}, {1}, {7}, {3, 65}, {}, {2, 2}};
  return all;
}

class Weights : public torch::nn::Module {
 public:
  Weights() {
    for (std::size_t i = 0; i < sizes().size(); ++i) {
      weights_.push_back(register_parameter(text("w", i), random(sizes()[i], i)));
    }
  }
  // The gradient of weight i is gradient_of(step, i) times a factor of the rank whose mean over ranks is 1.
  [[nodiscard]] at::Tensor forward(int step, double factor) const;

 private:
  std::vector<at::Tensor> weights_;
};

at::Tensor gradient_of(int step, std::size_t index) {
  return random(sizes()[index], static_cast<uint64_t>(1000 * (step + 1)) + index);
}

// One parameter stops being used: its gradient is zero from then on, and decay and moments go on.
bool used(int step, std::size_t index) { return index != 2 || step < 5; }

at::Tensor Weights::forward(int step, double factor) const {
  at::Tensor loss;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    if (!used(step, i)) continue;
    const at::Tensor term = (weights_[i] * gradient_of(step, i) * factor).sum();
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

// torch.optim.AdamW's algorithm box, PyTorch 2.11 documentation, without amsgrad and maximize.
struct Reference {
  at::Tensor weight, first, second;
  int t = 0;

  explicit Reference(const at::Tensor& start)
      : weight(start.to(at::kDouble)), first(at::zeros_like(weight)), second(at::zeros_like(weight)) {}

  void update(const at::Tensor& gradient, double rate) {
    ++t;
    weight = weight - rate * kDecay * weight;
    first = kBeta1 * first + (1 - kBeta1) * gradient;
    second = kBeta2 * second + (1 - kBeta2) * gradient * gradient;
    const at::Tensor m = first / (1 - std::pow(kBeta1, t));
    const at::Tensor v = second / (1 - std::pow(kBeta2, t));
    weight = weight - rate * m / (at::sqrt(v) + kEps);
  }
};

class AdamWReference : public testing::TestWithParam<std::tuple<int, Strategy>> {};
INSTANTIATE_TEST_SUITE_P(Ranks, AdamWReference,
                         testing::Combine(testing::Values(1, 4), testing::ValuesIn(runtime::kStrategies)),
                         [](const auto& info) {
                           return text("Ranks", std::get<0>(info.param), "_",
                                       runtime::to_string(std::get<1>(info.param)));
                         });

TEST_P(AdamWReference, TenStepsFollowTheDocumentedUpdate) {
  const auto [ranks, strategy] = GetParam();
  run_watched_ranks(ranks, [&, strategy = strategy, ranks = ranks](comm::PeerGroup& group) {
    const auto module = std::make_shared<Weights>();
    std::vector<Reference> reference;
    for (const auto& weight : module->parameters()) reference.emplace_back(weight.detach());
    const auto model = watched_shard(group, module, std::vector<std::shared_ptr<torch::nn::Module>>{},
                                     {.strategy = strategy});
    optim::AdamW optimizer(*model, {.beta1 = kBeta1, .beta2 = kBeta2, .eps = kEps, .weight_decay = kDecay});
    int64_t empty = 0;
    for (const auto& shard : model->shards()) empty += shard.numel() == 0 ? 1 : 0;
    const double empty_shards = group.sum(std::array{static_cast<double>(empty)})[0];
    EXPECT_EQ(empty_shards > 0, ranks > 1 && shards_optimizer(strategy)) << "empty shards are tested";
    const double factor = 2.0 * (group.rank() + 1) / (ranks + 1);  // mean over ranks: 1
    for (int step = 0; step < kSteps; ++step) {
      call(*module, step, factor).backward();
      optimizer.step(rate_of(step));
      model->zero_grad();
      const std::vector<at::Tensor> weights = model->full_weights();
      for (std::size_t i = 0; i < weights.size(); ++i) {
        const at::Tensor gradient = gradient_of(step, i).to(at::kDouble) * (used(step, i) ? 1 : 0);
        reference[i].update(gradient, rate_of(step));
        EXPECT_TRUE(at::allclose(weights[i].to(at::kDouble), reference[i].weight, 1e-6, 1e-6))
            << "w" << i << ", step " << step << ": off by "
            << (weights[i].to(at::kDouble) - reference[i].weight).abs().max().item<double>();
      }
    }
  });
}

// Without any gradient a parameter is skipped: neither decayed nor counted, as torch.optim.AdamW does.
TEST(AdamW, SkipsParametersWithoutGradient) {
  at::Tensor idle = random({5}, 1).requires_grad_();
  at::Tensor late = random({5}, 2).requires_grad_();
  const at::Tensor before = idle.detach().clone();
  Reference reference(late.detach());
  optim::AdamW optimizer({idle, late},
                         {.beta1 = kBeta1, .beta2 = kBeta2, .eps = kEps, .weight_decay = kDecay});
  for (int step = 0; step < 4; ++step) {
    if (step >= 2) {  // its state starts at step 0 when its first gradient comes
      late.mutable_grad() = random({5}, static_cast<uint64_t>(10 + step));
      reference.update(late.grad().to(at::kDouble), 0.01);
    }
    optimizer.step(0.01);
  }
  EXPECT_TRUE(idle.equal(before));
  EXPECT_TRUE(at::allclose(late.detach().to(at::kDouble), reference.weight, 1e-6, 1e-6));
}

}  // namespace
}  // namespace fsdpp
