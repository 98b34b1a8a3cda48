// Real fp32 training of the Llama: four ranks follow one rank with the same global batch.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/nn/llama.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/clip.h"
#include "fsdpp/optim/schedule.h"
#include "fsdpp/runtime/call.h"
#include "fsdpp/runtime/fully_shard.h"
#include "tests/support/hazard_watch.h"

namespace fsdpp {
namespace {

using runtime::Strategy;
using test::run_watched_ranks;
using test::watched_shard;

constexpr int kSteps = 20;
constexpr int64_t kGlobalBatch = 8;
constexpr int64_t kLength = 32;
constexpr double kClip = 1.0;

enum class Kind { untied, tied, experts, adapters, recomputed, delayed_and_offloaded };

nn::LlamaConfig config_of(Kind kind) {
  nn::LlamaConfig config{.vocabulary = 257, .dim = 32, .layers = 3, .heads = 4, .kv_heads = 2, .ffn = 64};
  config.tied = kind == Kind::tied;
  if (kind == Kind::experts) config.experts = 4;
  if (kind == Kind::adapters) config.adapter_rank = 8;
  if (kind == Kind::recomputed) config.recompute = nn::Recompute::non_reentrant;
  return config;
}

// Sequences that count upwards from a random start by a random small stride: something to learn. [8, length +
// 1].
at::Tensor global_batch(int step, int64_t vocabulary) {
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(100 + step));
  const at::Tensor start = at::randint(0, vocabulary, {kGlobalBatch, 1}, generator, at::kLong);
  const at::Tensor stride = at::randint(1, 4, {kGlobalBatch, 1}, generator, at::kLong);
  const at::Tensor position = at::ones({1, kLength + 1}, at::kLong).cumsum(1);
  return (start + stride * position).remainder(vocabulary);
}

struct Curve {
  std::vector<double> losses;              // means over the global batch
  std::vector<std::vector<double>> norms;  // before clipping: per step, of each rank
};

Curve train(int ranks, Strategy strategy, Kind kind) {
  Curve curve;
  run_watched_ranks(ranks, [&](comm::PeerGroup& group) {
    const auto llama = std::make_shared<nn::Llama>(config_of(kind), /*seed=*/7);
    runtime::Options options{.strategy = strategy};
    if (kind == Kind::delayed_and_offloaded) {
      options.delay_wgrad = true;
      options.offload = shards_optimizer(strategy);
    }
    const auto model = watched_shard(group, llama, llama->units(), options);
    optim::AdamW optimizer(*model, {.beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1});
    const int64_t rows = kGlobalBatch / ranks;
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor own =
          global_batch(step, llama->config().vocabulary).narrow(0, group.rank() * rows, rows);
      const at::Tensor loss = call(*llama, own.narrow(1, 0, kLength), own.narrow(1, 1, kLength));
      loss.backward();
      model->backward_dw();
      const double norm = optim::clip_grad_norm(*model, kClip);
      optimizer.step(optim::warmup_cosine(step, /*warmup=*/5, kSteps, /*peak=*/1e-2, /*min_ratio=*/0.1));
      model->zero_grad();
      const double mean = group.sum(std::array{loss.item<double>()})[0] / ranks;
      const std::vector<double> norms = group.exchange(std::array{norm});
      if (group.rank() != 0) continue;
      curve.losses.push_back(mean);
      curve.norms.push_back(norms);
    }
  });
  return curve;
}

using Parameters = std::tuple<Strategy, Kind>;

std::string name_of(const testing::TestParamInfo<Parameters>& info) {
  const std::array names = {"Untied", "Tied", "Experts", "Adapters", "Recomputed", "DelayedAndOffloaded"};
  const auto [strategy, kind] = info.param;
  return text(runtime::to_string(strategy), "_", names.at(static_cast<std::size_t>(kind)));
}

class LlamaTraining : public testing::TestWithParam<Parameters> {};
INSTANTIATE_TEST_SUITE_P(Fp32, LlamaTraining,
                         testing::Combine(testing::ValuesIn(runtime::kStrategies),
                                          testing::Values(Kind::untied, Kind::tied, Kind::experts,
                                                          Kind::adapters, Kind::recomputed,
                                                          Kind::delayed_and_offloaded)),
                         name_of);

TEST_P(LlamaTraining, FourRanksFollowOne) {
  const auto [strategy, kind] = GetParam();
  at::set_num_threads(1);  // the ranks are threads already
  const Curve one = train(1, strategy, kind);
  const Curve four = train(4, strategy, kind);
  ASSERT_EQ(one.losses.size(), static_cast<std::size_t>(kSteps));
  ASSERT_EQ(four.losses.size(), one.losses.size());
  double worst = 0;
  bool clipped = false;
  for (std::size_t step = 0; step < one.losses.size(); ++step) {
    worst = std::max(worst, std::abs(four.losses[step] - one.losses[step]) / one.losses[step]);
    EXPECT_NEAR(four.losses[step], one.losses[step], 1e-6 * one.losses[step]) << "step " << step;
    const double norm = one.norms[step].at(0);
    clipped = clipped || norm > kClip;
    for (const double of_rank : four.norms[step]) {
      EXPECT_EQ(of_rank, four.norms[step][0]) << "ranks disagree on the norm of step " << step;
      EXPECT_NEAR(of_rank, norm, 1e-4 * norm) << "step " << step;
    }
  }
  EXPECT_TRUE(clipped || kind == Kind::adapters) << "no step was clipped: the clipping was not tested";
  const double learnt = kind == Kind::adapters ? 0.01 : 1;  // little can be learnt around a random base
  EXPECT_LT(one.losses.back(), one.losses.front() - learnt) << "nothing was learnt";
  RecordProperty("worst_relative_difference", std::to_string(worst * 1e9) + "e-9");
}

}  // namespace
}  // namespace fsdpp
