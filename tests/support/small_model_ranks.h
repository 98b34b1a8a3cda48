#pragma once

#include <gtest/gtest.h>

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/runtime/fully_shard.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_net.h"

namespace fsdpp::test {

using runtime::Combine;
using runtime::Options;
using runtime::ShardedModel;
using runtime::Strategy;

struct Ranks {
  Strategy strategy;
  int count;
  bool late = false;    // rows that a rank owns are added onto the peers' sum, however few
  int replicas = 1;     // of each shard, on a hybrid mesh
  bool parted = false;  // main weights are sharded over them too
};

/// A test that runs under every strategy with 1 to 4 thread ranks, also arranged as a hybrid mesh.
class OnRanks : public ::testing::TestWithParam<Ranks> {
 public:
  void SetUp() override { watch_replicas(GetParam().replicas); }
  void TearDown() override { watch_replicas(1); }
  static Strategy strategy() { return GetParam().strategy; }
  static int ranks() { return GetParam().count; }
  static bool hybrid() { return GetParam().replicas > 1; }
  static bool parted() { return GetParam().parted; }
  static bool sharded() { return shards_optimizer(strategy()); }
  static bool reduces_every_backward() { return shards_gradients(strategy()); }
  /// Sums, since a mean over three ranks is not exact.
  static Options options() {
    return {.strategy = strategy(),
            .combine = Combine::sum,
            .late_group_elements = GetParam().late ? 0 : -1,
            .shard_optimizer_over_replicas = GetParam().parted};
  }
};

inline std::string parameters_name(const ::testing::TestParamInfo<Ranks>& info) {
  return runtime::to_string(info.param.strategy) + "_on_" + std::to_string(info.param.count) +
         (info.param.replicas > 1 ? "_in_" + std::to_string(info.param.replicas) : "") +
         (info.param.parted ? "_parted" : "") + (info.param.late ? "_late" : "");
}

inline auto all_ranks() {
  std::vector<Ranks> all;
  for (const int count : {1, 2, 3, 4}) {
    for (const Strategy strategy : runtime::kStrategies) all.push_back({strategy, count, false});
    if (count > 1) all.push_back({Strategy::optim_grads_params, count, true});
  }
  all.push_back({Strategy::no_shard, 4, false, 2});
  all.push_back({Strategy::optim, 4, false, 2});
  all.push_back({Strategy::optim, 4, false, 2, true});
  all.push_back({Strategy::optim_grads_params, 3, false, 3});
  all.push_back({Strategy::optim_grads_params, 4, true, 2});
  all.push_back({Strategy::optim_grads_params, 4, true, 2, true});
  return ::testing::ValuesIn(all);
}

inline Options sharded_sum() { return {.strategy = Strategy::optim_grads_params, .combine = Combine::sum}; }

/// Runs `act` and returns the text of the E it throws; empty, with a failure, when it throws none.
template <class E = UsageError, class Act>
std::string thrown_text(Act&& act) {
  try {
    act();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

inline void expect_in(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in: " << text;
}

/// Bit for bit, shapes included.
inline void expect_same(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (!actual.defined()) return;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::equal(actual, expected.detach())) << what << "\n" << actual << "\nexpected\n" << expected;
}

/// Runs `module`'s backward over `batches` as one process would, without sharding: gradients add up.
inline void oracle_backward(SmallNet& net, const std::vector<at::Tensor>& batches) {
  for (const at::Tensor& batch : batches) small_loss(net.run(batch)).backward();
}

/// Batches of all ranks for microbatch `index`.
inline std::vector<at::Tensor> all_batches(int64_t dim, int ranks, int index = 0) {
  std::vector<at::Tensor> batches;
  for (int rank = 0; rank < ranks; ++rank) batches.push_back(small_batch(dim, rank, index));
  return batches;
}

/// The reduced gradients are the oracle's. Parameters without a gradient there have zeros here, or none.
inline void expect_gradients(ShardedModel& model, const torch::nn::Module& oracle) {
  const std::vector<at::Tensor> gradients = model.full_gradients();
  const auto names = model.parameters();
  const auto expected = oracle.named_parameters();
  for (std::size_t i = 0; i < names.size(); ++i) {
    const at::Tensor* other = expected.find(names[i].first);
    ASSERT_NE(other, nullptr) << names[i].first;
    if (!other->requires_grad()) continue;
    if (other->grad().defined()) {
      expect_same(gradients[i], other->grad(), "gradient of " + names[i].first);
    } else if (gradients[i].defined()) {
      expect_same(gradients[i], at::zeros_like(gradients[i]), "gradient of unused " + names[i].first);
    }
  }
}

inline void expect_weights(ShardedModel& model, const torch::nn::Module& oracle) {
  const std::vector<at::Tensor> weights = model.full_weights();
  const auto names = model.parameters();
  const auto expected = oracle.named_parameters();
  for (std::size_t i = 0; i < names.size(); ++i)
    expect_same(weights[i], expected[names[i].first], names[i].first);
}

/// An optimizer that keeps integers small: a weight falls by one where its gradient leaves 1 when divided by
/// 4. A tied weight may be listed more than once.
inline void integer_step(const std::vector<at::Tensor>& weights) {
  const at::NoGradGuard no_grad;
  std::set<const void*> seen;
  for (at::Tensor weight : weights) {
    const bool first = seen.insert(weight.unsafeGetTensorImpl()).second;
    if (first && weight.grad().defined()) weight.sub_(at::remainder(weight.grad(), 4).eq(1).to(at::kFloat));
  }
}

inline void clear(const torch::nn::Module& module) {
  for (at::Tensor parameter : module.parameters()) parameter.mutable_grad().reset();
}

}  // namespace fsdpp::test
