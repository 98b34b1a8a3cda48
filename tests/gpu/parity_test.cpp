// The bits of plain libtorch on one process and the whole batch, from ranks that are GPUs.
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/mesh_group.h"
#include "fsdpp/device/cuda.h"
#include "fsdpp/runtime/call.h"
#include "fsdpp/runtime/fully_shard.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/support/integer_model.h"
#include "tests/support/sharded_integer_model.h"

namespace fsdpp::test {
namespace {

using runtime::Combine;
using runtime::Strategy;

constexpr int kSteps = 4;
constexpr int kDelayUs = 1000;  // many times a step of this small model
constexpr double kRate = 1.0 / 16;

struct Configuration {
  Strategy strategy;
  int microbatches;
  bool tied;
  bool fused;
  bool bf16;
  bool rows = false;  // the embedding is exchanged by rows
  bool kept = false;  // full weights stay where they are
  bool late = false;  // own rows are added onto the peers' sum, however few
  bool bf16_wire = false;
  bool replicas = false;  // every rank is a replica of the others on a hybrid mesh
  bool parted = false;    // which shard the main weights among themselves
  nn::Recompute recompute = nn::Recompute::none;
  bool delayed = false;  // weight gradients come with backward_dw()
  bool offload = false;  // main weights in host memory
  bool by_unit = false;  // units have the strategies in turn
  bool narrow = false;   // gradients are stored in bf16, and main weights are the model's
};

std::string name_of(const Configuration& c) {
  return text(runtime::to_string(c.strategy), ", ", c.microbatches, " microbatches", c.tied ? ", tied" : "",
              c.fused ? ", fused" : ", unfused", c.bf16 ? ", bf16" : ", fp32", c.rows ? ", rows" : "",
              c.kept ? ", kept" : "", c.late ? ", late" : "", c.bf16_wire ? ", bf16 wire" : "",
              c.replicas ? ", replicas" : "", c.parted ? ", parted" : "",
              c.recompute == nn::Recompute::none ? "" : ", recompute " + nn::to_string(c.recompute),
              c.delayed ? ", delayed" : "", c.offload ? ", offload" : "", c.by_unit ? ", by unit" : "",
              c.narrow ? ", narrow" : "");
}

// Units that choose for themselves.
void add_choices(std::vector<Configuration>& all, Configuration c) {
  c.by_unit = true;
  c.late = c.kept = all.size() % 3 == 0;
  c.delayed = all.size() % 4 == 0;
  all.push_back(c);
  c.replicas = true;
  all.push_back(c);
  c.replicas = false;
  c.narrow = true;
  if (c.bf16) all.push_back(c);  // else they would not hold the weights
}

// Ways to run a backward; what else there is takes turns.
void add_schedules(std::vector<Configuration>& all, Configuration c) {
  for (const nn::Recompute recompute :
       {nn::Recompute::none, nn::Recompute::reentrant, nn::Recompute::non_reentrant}) {
    for (const bool delayed : {false, true}) {
      c.recompute = recompute;
      c.delayed = delayed;
      c.late = shards_gradients(c.strategy) && all.size() % 3 == 0;
      c.kept = shards_parameters(c.strategy) && all.size() % 5 == 0;
      c.offload = shards_optimizer(c.strategy) && all.size() % 2 == 0;
      if (recompute != nn::Recompute::none || delayed) all.push_back(c);
    }
  }
}

std::vector<Configuration> configurations() {
  std::vector<Configuration> all;
  for (const Strategy strategy : runtime::kStrategies) {
    for (const int microbatches : {1, 3}) {
      for (const bool tied : {false, true}) {
        for (const bool fused : {false, true}) {
          for (const bool bf16 : {false, true}) {
            all.push_back({strategy, microbatches, tied, fused, bf16});
            Configuration hybrid = all.back();
            hybrid.replicas = true;
            all.push_back(hybrid);
            hybrid.parted = shards_optimizer(strategy);
            hybrid.late = shards_gradients(strategy);
            if (hybrid.parted) all.push_back(hybrid);
            if (tied == (microbatches == 3)) add_schedules(all, {strategy, microbatches, tied, fused, bf16});
            if (tied == (microbatches == 1)) add_choices(all, {strategy, microbatches, tied, fused, bf16});
            if (!fused || !shards_gradients(strategy)) continue;
            all.push_back({strategy, microbatches, tied, fused, bf16, true});
            if (!shards_parameters(strategy)) continue;
            all.push_back({strategy, microbatches, tied, fused, bf16, true, true, true});
            all.push_back({strategy, microbatches, tied, fused, bf16, false, false, true});
            all.push_back({strategy, microbatches, tied, fused, bf16, false, false, false, true});
            all.push_back({strategy, microbatches, tied, fused, bf16, true, true, true, true});
          }
        }
      }
    }
  }
  return all;
}

IntegerBatch on_gpu(const IntegerBatch& batch, at::Device place, at::ScalarType dtype) {
  return {batch.tokens.to(place), batch.coefficients.to(at::TensorOptions(place).dtype(dtype))};
}

bool same(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  if (actual.defined() && actual.cpu().to(at::kFloat).equal(expected)) return true;
  std::cerr << what << " is wrong\n";
  return false;
}

/// One rank's training of one configuration. bf16 weights do not stay exact over updates: there the first
/// step is taken again and again.
class Training {
 public:
  Training(comm::MeshGroup& replicas, const Configuration& c, std::unique_ptr<device::Device> lanes,
           int steps = kSteps)
      : group_(replicas.whole()),
        steps_(steps),
        c_(c),
        model_{.tied = c.tied},
        place_(at::kCUDA, static_cast<c10::DeviceIndex>(lanes->gpu())) {
    net_ = std::make_shared<IntegerNet>(model_);
    runtime::Options options{.strategy = c.strategy,
                             .combine = Combine::mean,
                             .row_exchange_bytes = c.rows ? 0 : -1,
                             .wire_dtype = c.bf16_wire ? at::kBFloat16 : at::kFloat,
                             .keep_gathered_bytes = c.kept ? -1 : 0,
                             .late_group_elements = c.late ? 0 : -1,
                             .shard_optimizer_over_replicas = c.parted,
                             .offload = c.offload,
                             .delay_wgrad = c.delayed,
                             .fused = c.fused};
    net_->recompute = c.recompute;
    if (c.bf16) options.model_dtype = at::kBFloat16;
    if (c.narrow) {
      options.accumulation_dtype = at::kBFloat16;
      options.main_weights = runtime::MainWeights::model_dtype;
    }
    std::vector<runtime::UnitSpec> units = net_->units_with_rows();
    if (!c.rows) units.erase(units.begin());
    if (c.by_unit) {
      auto next = static_cast<std::size_t>(c.strategy);
      for (runtime::UnitSpec& unit : units)
        unit.choice.strategy = runtime::kStrategies[++next % runtime::kStrategies.size()];
    }
    sharded_ = c.replicas ? fully_shard(replicas, net_, units, options, std::move(lanes))
                          : fully_shard(group_, net_, units, options, std::move(lanes));
  }

  bool run(const std::vector<OracleStep>& oracle) {
    bool right = true;
    for (int step = 0; step < steps_; ++step) {
      const int data = c_.bf16 ? 0 : step;
      sharded_->zero_grad(step % 2 == 0);
      for (int i = 0; i < c_.microbatches; ++i) {
        const auto scope = sharded_->microbatch(i + 1 == c_.microbatches);
        const IntegerBatch batch = integer_batch(model_, data, i * group_.ranks() + group_.rank());
        call(*net_, on_gpu(batch, place_, c_.bf16 ? at::kBFloat16 : at::kFloat)).backward();
        sharded_->backward_dw();
      }
      right = check(oracle[static_cast<std::size_t>(data)], step) && right;
    }
    const runtime::Counters counters = sharded_->counters();
    const bool planned = (c_.delayed || counters.spills == 0) && counters.weight_overflows == 0;
    return right && (planned || (c_.rows && c_.tied)) && counters.on_demand_gathers == 0;
  }

 private:
  // Gradients in host memory are there when the backward returns: nobody waits for them later.
  bool are_there(const std::vector<at::Tensor>& early) {
    const std::vector<at::Tensor> shards = sharded_->shards();
    for (std::size_t i = 0; i < early.size(); ++i) {
      if (early[i].equal(shards[i].grad())) continue;
      std::cerr << "rank " << group_.rank() << ": a gradient came to host memory after the backward\n";
      return false;
    }
    return true;
  }

  bool check(const OracleStep& expected, int step) {
    bool right = true;
    std::vector<at::Tensor> early;
    for (const at::Tensor& shard : sharded_->shards()) {
      if (c_.offload) early.push_back(shard.grad().clone());
    }
    const std::vector<at::Tensor> gradients = sharded_->full_gradients();
    right = are_there(early) && right;
    const auto names = sharded_->parameters();
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      right = same(gradients[i], expected.gradients[i],
                   text("rank ", group_.rank(), ", step ", step, ": gradient of ", names[i].first)) &&
              right;
    }
    if (c_.bf16) return right;
    const at::NoGradGuard no_grad;
    for (at::Tensor shard : sharded_->shards()) shard.sub_(kRate * shard.grad());
    if (step % 2 == 0) return right;  // after even steps the next forward has to publish by itself
    const std::vector<at::Tensor> weights = sharded_->full_weights();
    for (std::size_t i = 0; i < weights.size(); ++i) {
      right = same(weights[i], expected.weights[i],
                   text("rank ", group_.rank(), ", step ", step, ": ", names[i].first)) &&
              right;
    }
    return right;
  }

  comm::PeerGroup& group_;
  int steps_;
  Configuration c_;
  IntegerModel model_;
  at::Device place_;
  std::shared_ptr<IntegerNet> net_;
  std::shared_ptr<runtime::ShardedModel> sharded_;
};

bool train_all(comm::PeerGroup& group, const device::CudaOptions& lanes) {
  comm::MeshGroup replicas(group, comm::hybrid_mesh(group.ranks(), group.ranks()));
  bool right = true;
  int count = 0;
  for (const Configuration& c : configurations()) {
    const bool narrow_sums = c.bf16_wire || c.narrow;
    if (narrow_sums && group.lanes().collectives() != nullptr) continue;  // refused
    if (c.replicas && group.ranks() == 1) continue;
    const std::vector<OracleStep> oracle =
        integer_oracle({.tied = c.tied}, Descent{.steps = kSteps,
                                                 .pieces = group.ranks() * c.microbatches,
                                                 .divisor = group.ranks(),
                                                 .rate = kRate});
    const bool one = Training(replicas, c, device::make_cuda_device(group.rank(), lanes)).run(oracle);
    if (!one) std::cerr << "wrong: " << name_of(c) << "\n";
    right = right && one;
    ++count;
  }
  if (group.rank() == 0) std::cout << "configurations " << count << "\n";
  return right;
}

const RegisterGpuBody parity("parity", [](comm::PeerGroup& group) {
  device::CudaOptions lanes;
  lanes.poison = std::getenv("FSDPP_TEST_POISON") != nullptr;
  return train_all(group, lanes);
});

// One training after another in which one operation's lane is held up: the k-th of every step. What a missing
// wait would let through shows, the more so as memory is poisoned between its lives.
bool train_with_delays(comm::PeerGroup& group, const Configuration& c) {
  comm::MeshGroup replicas(group, comm::hybrid_mesh(group.ranks(), group.ranks()));
  bool right = true;
  const std::vector<OracleStep> oracle = integer_oracle(
      {},
      Descent{.steps = 1, .pieces = group.ranks() * c.microbatches, .divisor = group.ranks(), .rate = kRate});
  int64_t operations = 0;  // of one training
  int64_t now = 0;
  int64_t chosen = -1;
  device::CudaOptions lanes;
  lanes.poison = true;
  lanes.delay_us = [&](const device::Operation&) { return now++ == chosen ? kDelayUs : 0; };
  const auto train = [&](int64_t which) {
    now = 0;
    chosen = which;
    const bool one = Training(replicas, c, device::make_cuda_device(group.rank(), lanes), 2).run(oracle);
    if (!one) std::cerr << "wrong with operation " << which << " delayed: " << name_of(c) << "\n";
    operations = now;
    return one;
  };
  right = train(-1) && right;
  const std::vector<double> most = group.exchange(std::vector<double>{static_cast<double>(operations)});
  const auto count = static_cast<int64_t>(*std::max_element(most.begin(), most.end()));
  if (group.rank() == 0) std::cout << "delayed operations " << count << "\n" << std::flush;
  for (int64_t which = 0; which < count; ++which) {
    // Ranks take turns: a schedule in which all are late alike hides what one of them misses.
    right = train(which % group.ranks() == group.rank() ? which : -1) && right;
  }
  return right;
}

// Fused, bf16; each as a body of its own.
const std::array<std::pair<const char*, Configuration>, 10> kDelayed = {{
    {"delays_no_shard", {Strategy::no_shard, 1, false, true, true}},
    {"delays_optim", {Strategy::optim, 3, false, true, true}},
    {"delays_replicas",
     {Strategy::optim_grads_params, 1, false, true, true, false, false, true, false, true}},
    {"delays_parted", {Strategy::optim, 3, false, true, true, false, false, false, false, true, true}},
    {"delays_slots", {Strategy::optim_grads_params, 1, false, true, true}},
    {"delays_rows", {Strategy::optim_grads_params, 1, false, true, true, true}},
    {"delays_late", {Strategy::optim_grads_params, 1, false, true, true, true, true, true}},
    {"delays_wgrad",
     {Strategy::optim_grads_params, 1, false, true, true, false, false, true, false, false, false,
      nn::Recompute::reentrant, true}},
    {"delays_offload",
     {.strategy = Strategy::optim_grads,
      .microbatches = 1,
      .tied = false,
      .fused = true,
      .bf16 = true,
      .offload = true}},
    {"delays_by_unit",
     {.strategy = Strategy::optim_grads_params,
      .microbatches = 2,
      .tied = false,
      .fused = true,
      .bf16 = true,
      .by_unit = true,
      .narrow = true}},
}};
const std::array<RegisterGpuBody, 10> delays = {{
    {kDelayed[0].first, [](comm::PeerGroup& group) { return train_with_delays(group, kDelayed[0].second); }},
    {kDelayed[1].first, [](comm::PeerGroup& group) { return train_with_delays(group, kDelayed[1].second); }},
    {kDelayed[2].first, [](comm::PeerGroup& group) { return train_with_delays(group, kDelayed[2].second); }},
    {kDelayed[3].first, [](comm::PeerGroup& group) { return train_with_delays(group, kDelayed[3].second); }},
    {kDelayed[4].first, [](comm::PeerGroup& group) { return train_with_delays(group, kDelayed[4].second); }},
    {kDelayed[5].first, [](comm::PeerGroup& group) { return train_with_delays(group, kDelayed[5].second); }},
    {kDelayed[6].first, [](comm::PeerGroup& group) { return train_with_delays(group, kDelayed[6].second); }},
    {kDelayed[7].first, [](comm::PeerGroup& group) { return train_with_delays(group, kDelayed[7].second); }},
    {kDelayed[8].first, [](comm::PeerGroup& group) { return train_with_delays(group, kDelayed[8].second); }},
    {kDelayed[9].first, [](comm::PeerGroup& group) { return train_with_delays(group, kDelayed[9].second); }},
}};

class GpuDelays : public testing::TestWithParam<int> {};

TEST_P(GpuDelays, EachOperationInTurnIsHeldUpAndTheBitsStayTheSame) {
  if (device::cuda_devices() < 2) GTEST_SKIP() << "needs 2 GPUs";
  record_figure("hazards_checked", run_on_gpus(kDelayed.at(static_cast<std::size_t>(GetParam())).first, 2),
                "delayed operations ");
}

INSTANTIATE_TEST_SUITE_P(Bodies, GpuDelays, testing::Range(0, 10), [](const auto& info) {
  return std::string(kDelayed.at(static_cast<std::size_t>(info.param)).first);
});

class GpuParity : public testing::TestWithParam<std::tuple<int, const char*>> {};

TEST_P(GpuParity, TrainsWithTheBitsOfOneProcess) {
  const auto [ranks, via] = GetParam();
  if (device::cuda_devices() < ranks) GTEST_SKIP() << "needs " << ranks << " GPUs";
  const std::string printed =
      run_on_gpus("parity", ranks, {{"FSDPP_TEST_VIA", via}, {"FSDPP_TEST_POISON", "1"}});
  record_figure("parity_configurations", printed, "configurations ");
}

INSTANTIATE_TEST_SUITE_P(Integers, GpuParity,
                         testing::Values(std::tuple(1, "peers"), std::tuple(2, "peers"),
                                         std::tuple(2, "nccl")),
                         [](const auto& info) {
                           return text("Ranks", std::get<0>(info.param), "_", std::get<1>(info.param));
                         });

}  // namespace
}  // namespace fsdpp::test

int main(int argc, char** argv) { return fsdpp::test::gpu_main(argc, argv); }
