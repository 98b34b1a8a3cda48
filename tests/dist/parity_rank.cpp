#include "tests/dist/parity_rank.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/c10d_collectives.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/comm/mesh_group.h"
#include "fsdpp/runtime/call.h"
#include "fsdpp/runtime/fully_shard.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/thread_c10d.h"

namespace fsdpp::test {
namespace {

using runtime::Combine;
using runtime::Strategy;

constexpr int kSteps = 4;  // the third step is the first one planned from a step that was
constexpr double kRate = 1.0 / 16;

bool is_power_of_two(int value) { return (value & (value - 1)) == 0; }

// Sees each weight right after its accumulator ran and before the runtime does: the hook is older than the
// sharding.
class GradientSpy final : public torch::autograd::FunctionPostHook {
 public:
  struct Seen {
    int runs = 0;
    int gradients = 0;  // a .grad of the weight's own was there
  };
  GradientSpy(at::Tensor weight, std::shared_ptr<Seen> seen)
      : weight_(std::move(weight)), seen_(std::move(seen)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    ++seen_->runs;
    if (weight_.grad().defined()) ++seen_->gradients;
    return outputs;
  }

 private:
  at::Tensor weight_;
  std::shared_ptr<Seen> seen_;
};

// One rank's training, compared with the oracle after each step.
class Rank {
 public:
  Rank(comm::PeerGroup& group, const ParityConfiguration& configuration,
       const std::vector<OracleStep>& oracle)
      : group_(group),
        c_(configuration),
        oracle_(oracle),
        model_{.blocks = configuration.blocks, .tied = configuration.tied} {
    net_ = std::make_shared<IntegerNet>(model_);
    net_->recompute = c_.recompute;
    for (const auto& weight : net_->parameters()) {
      accumulators_.push_back(torch::autograd::impl::grad_accumulator(weight));
      accumulators_.back()->add_post_hook(std::make_unique<GradientSpy>(weight, seen_));
    }
    const runtime::Options options = options_of(c_);
    const std::vector<runtime::UnitSpec> units = units_of(c_, *net_);
    if (c_.replicas > 1) {
      mesh_ = std::make_unique<comm::MeshGroup>(group, comm::hybrid_mesh(c_.ranks, c_.replicas));
      if (c_.c10d) talk_through_c10d(mesh_->along("replicate"));
      sharded_ = watched_shard(*mesh_, net_, units, options);
    } else {
      if (c_.c10d) talk_through_c10d(group);
      sharded_ = watched_shard(group, net_, units, options);
    }
    const NamedTensors names = integer_weights(model_);
    const auto parameters = sharded_->parameters();
    EXPECT_EQ(parameters.size(), names.size());
    for (std::size_t i = 0; i < names.size(); ++i) EXPECT_EQ(parameters.at(i).first, names[i].first);
  }

  void train() {
    for (int step = 0; step < kSteps; ++step) {
      zero_gradients(step);
      const double loss = forward_and_backward(step);
      const double all = group_.sum(std::array{loss}).at(0);
      check_gradients(step);
      check_rest(step);
      if (c_.bf16) continue;  // its weights do not stay exact over updates: the first step again and again
      EXPECT_EQ(all, oracle_[static_cast<std::size_t>(step)].loss) << where(step);
      descend();
      check_weights(step);
    }
    check_fusion();
    check_counters();
  }

 private:
  void talk_through_c10d(comm::PeerGroup& among) {
    c10d_ = ThreadC10d::over(among);
    comm::use_c10d(among, c10d_);
  }

  [[nodiscard]] std::string where(int step) const { return text("rank ", group_.rank(), ", step ", step); }

  // The model's own way and a foreign optimizer's, by turns.
  void zero_gradients(int step) {
    if (step % 2 == 1) return sharded_->zero_grad(c_.set_to_none);
    for (at::Tensor shard : sharded_->shards()) {
      if (!shard.grad().defined()) continue;
      if (c_.set_to_none) {
        shard.mutable_grad().reset();
      } else {
        shard.mutable_grad().zero_();
      }
    }
  }

  double forward_and_backward(int step) {
    double loss = 0;
    if (c_.microbatches == 1) return run_piece(step, 0);  // every backward is a window
    for (int i = 0; i < c_.microbatches; ++i) {
      const auto scope = sharded_->microbatch(i + 1 == c_.microbatches);
      loss += run_piece(step, i);
    }
    return loss;
  }

  double run_piece(int step, int microbatch) {
    IntegerBatch batch = integer_batch(model_, data_of(step), microbatch * group_.ranks() + group_.rank());
    if (c_.bf16) batch.coefficients = batch.coefficients.to(at::kBFloat16);
    const at::Tensor loss = call(*net_, batch);
    loss.backward();
    if (c_.delayed) write_delayed(step);
    return loss.item<double>();
  }

  [[nodiscard]] int data_of(int step) const { return c_.bf16 ? 0 : step; }

  // All at once, or units in the order of the forward: the other way round than the backward's.
  void write_delayed(int step) {
    if (step % 2 == 0) return sharded_->backward_dw();
    for (const auto& unit : net_->units()) sharded_->backward_dw(*unit);
    sharded_->backward_dw();
  }

  // A foreign optimizer: writes the shards in place and tells nobody.
  void descend() {
    const at::NoGradGuard no_grad;
    for (at::Tensor shard : sharded_->shards()) shard.sub_(kRate * shard.grad());
  }

  void check_gradients(int step) {
    const auto& expected = oracle_[static_cast<std::size_t>(data_of(step))].gradients;
    const std::vector<at::Tensor> whole = sharded_->full_gradients();
    const auto shards = sharded_->shards();
    const auto parameters = sharded_->parameters();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      ASSERT_TRUE(whole.at(i).defined()) << parameters[i].first << ", " << where(step);
      EXPECT_TRUE(whole[i].equal(expected[i]))
          << "gradient of " << parameters[i].first << ", " << where(step);
      if (c_.strategy == Strategy::no_shard && !c_.by_unit) {  // here each rank has it whole
        EXPECT_TRUE(shards[i].grad().equal(expected[i]))
            << "shard's gradient of " << parameters[i].first << ", " << where(step);
      }
    }
  }

  // After each step from the shards; from full_weights() after odd steps only, since it publishes the
  // weights: after even steps the next forward has to do that by itself.
  void check_weights(int step) {
    const auto& expected = oracle_[static_cast<std::size_t>(step)].weights;
    const auto shards = sharded_->shards();
    const auto parameters = sharded_->parameters();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(joined(shards.at(i), expected[i].numel()).equal(expected[i].reshape({-1})))
          << "shards of " << parameters[i].first << ", " << where(step);
    }
    if (step % 2 == 0) return;
    const std::vector<at::Tensor> whole = sharded_->full_weights();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(whole.at(i).equal(expected[i])) << parameters[i].first << ", " << where(step);
    }
  }

  // The ranks' pieces of one parameter of `numel` elements, one after another; under no_shard each rank's
  // own.
  [[nodiscard]] at::Tensor joined(const at::Tensor& shard, int64_t numel) {
    std::vector<double> own(comm::PeerGroup::kMaxExchange);
    own[0] = static_cast<double>(shard.numel());
    for (int64_t i = 0; i < shard.numel(); ++i)
      own.at(static_cast<std::size_t>(i) + 1) = shard.data_ptr<float>()[i];
    const std::vector<double> all = sharded_->owners().exchange(own);
    const std::size_t parts = c_.parted ? static_cast<std::size_t>(c_.replicas) : 1;  // of a shard
    const std::size_t shards = all.size() / own.size() / parts;
    bool whole = true;  // on every rank
    for (std::size_t piece = 0; piece < shards * parts; ++piece)
      whole = whole && static_cast<int64_t>(all[piece * own.size()]) == numel;
    if (whole) return shard.detach().reshape({-1});
    std::vector<float> values;
    for (std::size_t piece = 0; piece < shards * parts; ++piece) {
      const std::size_t first = (piece % parts * shards + piece / parts) * own.size();
      for (std::size_t i = 1; i <= static_cast<std::size_t>(all[first]); ++i) {
        values.push_back(static_cast<float>(all[first + i]));
      }
    }
    return at::tensor(values);
  }

  void check_rest(int step) {
    if (c_.strategy == Strategy::optim_grads_params) {
      EXPECT_TRUE(sharded_->at_rest()) << where(step);
    }
  }

  // After a backward each weight's .grad is the guard, which cannot be read; during it there was none when
  // fused.
  void check_fusion() {
    const auto weights = net_->parameters();
    if (c_.bf16) return;  // other accumulators than those that were spied on
    const int runs = kSteps * c_.microbatches * static_cast<int>(weights.size());
    EXPECT_EQ(seen_->runs, runs) << "each accumulator runs once per backward";
    EXPECT_EQ(seen_->gradients, c_.fused ? 0 : runs);
    for (const at::Tensor& weight : weights) {
      ASSERT_TRUE(weight.grad().defined());
      EXPECT_THROW(weight.grad().sum(), std::exception);
    }
  }

  void check_counters() {
    const runtime::Counters counters = sharded_->counters();
    EXPECT_EQ(counters.on_demand_gathers, 0);
    // Rows that are tied are first used behind the blocks, not where they are registered.
    if (!(c_.rows && c_.tied) && !c_.delayed) {
      EXPECT_EQ(counters.spills, 0);
      EXPECT_EQ(counters.weight_overflows, 0);
    }
    const int units = model_.blocks + (c_.rows && c_.tied ? 2 : 1);
    const bool stay = !c_.by_unit && (c_.kept || !shards_parameters(c_.strategy));
    const int64_t passes =
        stay ? units * counters.publications : int64_t{2} * units * kSteps * c_.microbatches;
    EXPECT_LE(counters.gathers, c_.by_unit || shards_optimizer(c_.strategy) ? passes : 0);
    if (c_.c10d && c_.replicas > 1) check_replicas_calls(counters.publications);
  }

  // The sum over replicas comes once for each group and window, whatever lies between.
  void check_replicas_calls(int64_t publications) {
    const int groups = model_.blocks + 1;
    const int sums = groups * kSteps;
    // Weights at the start. Units that choose are whole in one of the four strategies that they take in turn.
    int first = shards_optimizer(c_.strategy) ? groups : 0;
    if (c_.by_unit) first = c_.offload ? groups : groups - 1;
    if (c_.parted) first = 0;
    const int parts = c_.parted ? groups * static_cast<int>(publications) : sums;
    EXPECT_EQ(c10d_->calls().reduces, first + sums);
    EXPECT_EQ(c10d_->calls().gathers, first + parts);
  }

  comm::PeerGroup& group_;
  const ParityConfiguration c_;
  const std::vector<OracleStep>& oracle_;
  const IntegerModel model_;
  std::shared_ptr<IntegerNet> net_;
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
  std::shared_ptr<GradientSpy::Seen> seen_ = std::make_shared<GradientSpy::Seen>();
  std::unique_ptr<comm::MeshGroup> mesh_;
  c10::intrusive_ptr<ThreadC10d> c10d_;
  std::shared_ptr<runtime::ShardedModel> sharded_;
};

}  // namespace

std::string name_of(const ParityConfiguration& c) {
  return text("Ranks", c.ranks, c.replicas > 1 ? text("_Replicas", c.replicas) : "", "_",
              runtime::to_string(c.strategy), c.parted ? "_Parted" : "", "_Microbatches", c.microbatches,
              c.set_to_none ? "_SetToNone" : "_SetToZero", c.tied ? "_Tied" : "_Untied",
              c.fused ? "_Fused" : "_Unfused", c.rows ? "_Rows" : "", c.kept ? "_Kept" : "",
              c.late ? "_Late" : "", c.bf16_wire ? "_Bf16Wire" : "",
              c.recompute == nn::Recompute::none ? "" : "_Recompute_" + nn::to_string(c.recompute),
              c.delayed ? "_Delayed" : "", c.bf16 ? "_Bf16" : "", c.offload ? "_Offload" : "",
              c.inner > 0 ? text("_Inner", c.inner) : "", c.by_unit ? "_ByUnit" : "",
              c.narrow ? "_Narrow" : "", c.c10d ? "_C10d" : "");
}

runtime::Options options_of(const ParityConfiguration& c) {
  runtime::Options options{.strategy = c.strategy,
                           .combine = is_power_of_two(c.ranks) ? Combine::mean : Combine::sum,
                           .row_exchange_bytes = c.rows ? 0 : -1,
                           .wire_dtype = c.bf16_wire ? at::kBFloat16 : at::kFloat,
                           .keep_gathered_bytes = c.kept ? -1 : 0,
                           .late_group_elements = c.late ? 0 : -1,
                           .shard_optimizer_over_replicas = c.parted,
                           .offload = c.offload,
                           .delay_wgrad = c.delayed,
                           .fused = c.fused};
  if (c.bf16) options.model_dtype = at::kBFloat16;
  if (c.inner > 0) options.reshard_after_forward = c.inner;
  if (!c.narrow) return options;
  options.accumulation_dtype = at::kBFloat16;
  options.main_weights = runtime::MainWeights::model_dtype;
  return options;
}

// An embedding that is exchanged by rows keeps the root's strategy.
std::vector<runtime::UnitSpec> units_of(const ParityConfiguration& c, const IntegerNet& net) {
  std::vector<runtime::UnitSpec> units = net.units_with_rows();
  if (!c.rows) units.erase(units.begin());
  if (!c.by_unit) return units;
  const bool sharded = c.parted || c.offload;  // no_shard is refused
  std::vector<Strategy> others(runtime::kStrategies.begin() + (sharded ? 1 : 0), runtime::kStrategies.end());
  std::rotate(others.begin(), std::find(others.begin(), others.end(), c.strategy), others.end());
  std::size_t next = 1;
  for (runtime::UnitSpec& unit : units) {
    if (unit.use == runtime::Use::whole) unit.choice.strategy = others[next++ % others.size()];
  }
  return units;
}

// Configurations that differ in nothing that it sees share one.
const std::vector<OracleStep>& oracle_of(const ParityConfiguration& c) {
  static std::map<std::tuple<int, bool, int, int>, std::vector<OracleStep>> known;
  const int pieces = c.ranks * c.microbatches;
  const int divisor = is_power_of_two(c.ranks) ? c.ranks : 1;
  const auto [entry, fresh] = known.try_emplace({c.blocks, c.tied, pieces, divisor});
  if (fresh) {
    entry->second =
        integer_oracle({.blocks = c.blocks, .tied = c.tied},
                       Descent{.steps = kSteps, .pieces = pieces, .divisor = divisor, .rate = kRate});
  }
  return entry->second;
}

void train_like(const std::vector<OracleStep>& oracle, comm::PeerGroup& group,
                const ParityConfiguration& configuration) {
  Rank(group, configuration, oracle).train();
}

}  // namespace fsdpp::test
