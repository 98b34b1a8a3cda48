// Every configuration trains with the bits of plain libtorch on one process and the whole batch.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/comm/mesh_group.h"
#include "fsdpp/runtime/call.h"
#include "fsdpp/runtime/fully_shard.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/integer_model.h"
#include "tests/support/sharded_integer_model.h"

namespace fsdpp {
namespace {

using runtime::Combine;
using runtime::Strategy;
using test::Descent;
using test::IntegerModel;
using test::IntegerNet;
using test::OracleStep;
using test::run_watched_ranks;
using test::watched_shard;

constexpr int kSteps = 4;  // the third step is the first one planned from a step that was
constexpr double kRate = 1.0 / 16;

struct Configuration {
  int ranks;
  Strategy strategy;
  int microbatches;
  bool set_to_none = true;
  bool tied = false;
  bool fused = true;
  bool rows = false;       // the embedding is exchanged by rows
  bool kept = false;       // full weights stay where they are
  bool late = false;       // own rows are added onto the peers' sum, however few
  bool bf16_wire = false;  // every gradient is an integer that bf16 has
  int replicas = 1;        // of each shard, on a hybrid mesh
  bool parted = false;     // main weights are sharded over the replicas too
  int blocks = 3;
};

std::string name_of(const testing::TestParamInfo<Configuration>& info) {
  const Configuration& c = info.param;
  return text("Ranks", c.ranks, c.replicas > 1 ? text("_Replicas", c.replicas) : "", "_",
              runtime::to_string(c.strategy), c.parted ? "_Parted" : "", "_Microbatches", c.microbatches,
              c.set_to_none ? "_SetToNone" : "_SetToZero", c.tied ? "_Tied" : "_Untied",
              c.fused ? "_Fused" : "_Unfused", c.rows ? "_Rows" : "", c.kept ? "_Kept" : "",
              c.late ? "_Late" : "", c.bf16_wire ? "_Bf16Wire" : "");
}

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
  Rank(comm::PeerGroup& group, const Configuration& configuration, const std::vector<OracleStep>& oracle)
      : group_(group),
        c_(configuration),
        oracle_(oracle),
        model_{.blocks = configuration.blocks, .tied = configuration.tied} {
    net_ = std::make_shared<IntegerNet>(model_);
    for (const auto& weight : net_->parameters()) {
      accumulators_.push_back(torch::autograd::impl::grad_accumulator(weight));
      accumulators_.back()->add_post_hook(std::make_unique<GradientSpy>(weight, seen_));
    }
    const runtime::Options options{.strategy = c_.strategy,
                                   .combine = is_power_of_two(c_.ranks) ? Combine::mean : Combine::sum,
                                   .row_exchange_bytes = c_.rows ? 0 : -1,
                                   .wire_dtype = c_.bf16_wire ? at::kBFloat16 : at::kFloat,
                                   .keep_gathered_bytes = c_.kept ? -1 : 0,
                                   .late_group_elements = c_.late ? 0 : -1,
                                   .shard_optimizer_over_replicas = c_.parted,
                                   .fused = c_.fused};
    std::vector<runtime::UnitSpec> units = net_->units_with_rows();
    if (!c_.rows) units.erase(units.begin());
    if (c_.replicas > 1) {
      mesh_ = std::make_unique<comm::MeshGroup>(group, comm::hybrid_mesh(c_.ranks, c_.replicas));
      sharded_ = watched_shard(*mesh_, net_, units, options);
    } else {
      sharded_ = watched_shard(group, net_, units, options);
    }
    const test::NamedTensors names = test::integer_weights(model_);
    const auto parameters = sharded_->parameters();
    EXPECT_EQ(parameters.size(), names.size());
    for (std::size_t i = 0; i < names.size(); ++i) EXPECT_EQ(parameters.at(i).first, names[i].first);
  }

  void train() {
    for (int step = 0; step < kSteps; ++step) {
      zero_gradients(step);
      const double loss = forward_and_backward(step);
      EXPECT_EQ(group_.sum(std::array{loss}).at(0), oracle_[static_cast<std::size_t>(step)].loss)
          << where(step);
      check_gradients(step);
      check_rest(step);
      descend();
      check_weights(step);
    }
    check_fusion();
    check_counters();
  }

 private:
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
    const at::Tensor loss =
        call(*net_, test::integer_batch(model_, step, microbatch * group_.ranks() + group_.rank()));
    loss.backward();
    return loss.item<double>();
  }

  // A foreign optimizer: writes the shards in place and tells nobody.
  void descend() {
    const at::NoGradGuard no_grad;
    for (at::Tensor shard : sharded_->shards()) shard.sub_(kRate * shard.grad());
  }

  void check_gradients(int step) {
    const auto& expected = oracle_[static_cast<std::size_t>(step)].gradients;
    const std::vector<at::Tensor> whole = sharded_->full_gradients();
    const auto shards = sharded_->shards();
    const auto parameters = sharded_->parameters();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      ASSERT_TRUE(whole.at(i).defined()) << parameters[i].first << ", " << where(step);
      EXPECT_TRUE(whole[i].equal(expected[i]))
          << "gradient of " << parameters[i].first << ", " << where(step);
      if (c_.strategy == Strategy::no_shard) {  // here each rank has it whole
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
      EXPECT_TRUE(joined(shards.at(i)).equal(expected[i].reshape({-1})))
          << "shards of " << parameters[i].first << ", " << where(step);
    }
    if (step % 2 == 0) return;
    const std::vector<at::Tensor> whole = sharded_->full_weights();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(whole.at(i).equal(expected[i])) << parameters[i].first << ", " << where(step);
    }
  }

  // The ranks' pieces of one parameter, one after another; under no_shard each rank's own.
  [[nodiscard]] at::Tensor joined(const at::Tensor& shard) {
    if (c_.strategy == Strategy::no_shard) return shard.detach().reshape({-1});
    std::vector<double> own(comm::PeerGroup::kMaxExchange);
    own[0] = static_cast<double>(shard.numel());
    for (int64_t i = 0; i < shard.numel(); ++i)
      own.at(static_cast<std::size_t>(i) + 1) = shard.data_ptr<float>()[i];
    const std::vector<double> all = sharded_->owners().exchange(own);
    const std::size_t parts = c_.parted ? static_cast<std::size_t>(c_.replicas) : 1;  // of a shard
    const std::size_t shards = all.size() / own.size() / parts;
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
    if (!(c_.rows &&
          c_.tied)) {  // there the table is first used behind the blocks, not where it is registered
      EXPECT_EQ(counters.spills, 0);
      EXPECT_EQ(counters.weight_overflows, 0);
    }
    const int units = model_.blocks + (c_.rows && c_.tied ? 2 : 1);
    const bool stay = c_.kept || !shards_parameters(c_.strategy);
    const int64_t passes =
        stay ? units * counters.publications : int64_t{2} * units * kSteps * c_.microbatches;
    EXPECT_LE(counters.gathers, shards_optimizer(c_.strategy) ? passes : 0);
  }

  comm::PeerGroup& group_;
  const Configuration c_;
  const std::vector<OracleStep>& oracle_;
  const IntegerModel model_;
  std::shared_ptr<IntegerNet> net_;
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
  std::shared_ptr<GradientSpy::Seen> seen_ = std::make_shared<GradientSpy::Seen>();
  std::unique_ptr<comm::MeshGroup> mesh_;
  std::shared_ptr<runtime::ShardedModel> sharded_;
};

// Configurations that differ in nothing that it sees share one.
const std::vector<OracleStep>& oracle_of(const Configuration& c) {
  static std::map<std::tuple<int, bool, int, int>, std::vector<OracleStep>> known;
  const int pieces = c.ranks * c.microbatches;
  const int divisor = is_power_of_two(c.ranks) ? c.ranks : 1;
  const auto [entry, fresh] = known.try_emplace({c.blocks, c.tied, pieces, divisor});
  if (fresh) {
    entry->second =
        test::integer_oracle({.blocks = c.blocks, .tied = c.tied},
                             Descent{.steps = kSteps, .pieces = pieces, .divisor = divisor, .rate = kRate});
  }
  return entry->second;
}

class Parity : public testing::TestWithParam<Configuration> {};

TEST_P(Parity, TrainsWithTheBitsOfOneProcess) {
  at::set_num_threads(1);  // the ranks are threads already
  const Configuration& c = GetParam();
  const std::vector<OracleStep>& oracle = oracle_of(c);
  ASSERT_FALSE(HasFailure()) << "the oracle is not exact: nothing to compare with";
  run_watched_ranks(c.ranks, [&](comm::PeerGroup& group) { Rank(group, c, oracle).train(); });
}

// Without blocks nothing but the rows' own signals says that they were read before they are written again.
TEST(ParityOfRows, WithoutAnyOtherUnit) {
  at::set_num_threads(1);
  for (const int ranks : {2, 3}) {
    const Configuration c{.ranks = ranks,
                          .strategy = Strategy::optim_grads_params,
                          .microbatches = 3,
                          .rows = true,
                          .blocks = 0};
    const std::vector<OracleStep>& oracle = oracle_of(c);
    test::run_watched_ranks(ranks, [&](comm::PeerGroup& group) { Rank(group, c, oracle).train(); });
  }
}

// Every value of each option with every other one that it goes with.
template <class Add>
void for_each_window(const Add& add) {
  for (const int microbatches : {1, 3}) {
    for (const bool set_to_none : {false, true}) {
      for (const bool tied : {false, true}) add(microbatches, set_to_none, tied);
    }
  }
}

std::vector<Configuration> flat() {
  std::vector<Configuration> all;
  for (const int ranks : {1, 2, 3, 4}) {
    for (const Strategy strategy : runtime::kStrategies) {
      for_each_window([&](int microbatches, bool set_to_none, bool tied) {
        for (const bool fused : {false, true})
          all.push_back({ranks, strategy, microbatches, set_to_none, tied, fused});
      });
    }
  }
  return all;
}

std::vector<Configuration> hybrid() {
  std::vector<Configuration> all;
  struct Mesh {
    int ranks, replicas;
  };
  for (const Mesh mesh : {Mesh{2, 2}, Mesh{3, 3}, Mesh{4, 2}, Mesh{4, 4}, Mesh{6, 3}}) {
    for (const Strategy strategy : runtime::kStrategies) {
      for (const bool parted : {false, true}) {
        if (parted && !shards_optimizer(strategy)) continue;  // refused
        for_each_window([&](int microbatches, bool set_to_none, bool tied) {
          if (mesh.ranks == 6 && microbatches == 3) return;  // sums beyond the oracle's exact integers
          Configuration c{mesh.ranks, strategy, microbatches, set_to_none, tied};
          c.replicas = mesh.replicas;
          c.parted = parted;
          all.push_back(c);
          if (mesh.ranks != 4) return;
          c.fused = false;
          all.push_back(c);
        });
      }
    }
  }
  return all;
}

// What some strategies offer besides.
std::vector<Configuration> with_options() {
  std::vector<Configuration> all;
  const auto add = [&](int ranks, int replicas, bool parted) {
    for (const Strategy strategy : {Strategy::optim_grads, Strategy::optim_grads_params}) {
      for_each_window([&](int microbatches, bool set_to_none, bool tied) {
        Configuration c{ranks, strategy, microbatches, set_to_none, tied};
        c.replicas = replicas;
        c.parted = parted;
        for (const int which : {1, 2, 3, 4, 5, 6, 7, 8, 10}) {
          c.rows = (which & 1) != 0;
          c.late = (which & 2) != 0;
          c.kept = (which & 4) != 0;
          c.bf16_wire = (which & 8) != 0;
          if (c.kept && !shards_parameters(strategy)) continue;  // they stay anyway
          if (c.bf16_wire && !is_power_of_two(ranks)) continue;  // sums beyond bf16's integers
          all.push_back(c);
        }
      });
    }
  };
  for (const int ranks : {1, 2, 3, 4}) add(ranks, 1, false);
  for (const bool parted : {false, true}) add(4, 2, parted);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Flat, Parity, testing::ValuesIn(flat()), name_of);
INSTANTIATE_TEST_SUITE_P(Hybrid, Parity, testing::ValuesIn(hybrid()), name_of);
INSTANTIATE_TEST_SUITE_P(Options, Parity, testing::ValuesIn(with_options()), name_of);

}  // namespace
}  // namespace fsdpp
