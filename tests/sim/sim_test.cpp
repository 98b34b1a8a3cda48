// The runtime on lanes that run when a seed says: every order must train with the bits of the serial run.
//
//   FSDPP_SIM_SEEDS=n      seeds per configuration
//   FSDPP_SIM_SEED=n FSDPP_SIM_POLICY=random|starve|longest FSDPP_SIM_CONFIG=name    that run alone
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <map>
#include <optional>

#include "fsdpp/base/error.h"
#include "fsdpp/device/sim.h"
#include "tests/sim/sim_training.h"
#include "tests/support/integer_model.h"

namespace fsdpp::test {
namespace {

using device::LaneKind;
using device::Operation;
using device::OperationKind;
using device::SimOptions;
using runtime::Strategy;

constexpr uint64_t kSeeds = 24;  // per configuration, unless FSDPP_SIM_SEEDS says otherwise

std::optional<std::string> from_environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

uint64_t seeds() { return seeds_asked_for(kSeeds); }

std::string reproduction(const SimConfig& config, SimOptions options) {
  return text("FSDPP_SIM_SEED=", options.seed, " FSDPP_SIM_POLICY=", device::to_string(options.policy),
              " FSDPP_SIM_CONFIG=", config.name(), " sim_test --gtest_filter='*/SimTraining.*'");
}

class SimTraining : public ::testing::TestWithParam<SimConfig> {
 protected:
  void SetUp() override {
    at::set_num_threads(1);  // the ranks are threads already
    const auto only = from_environment("FSDPP_SIM_CONFIG");
    if (only && *only != GetParam().name()) GTEST_SKIP() << "FSDPP_SIM_CONFIG asks for " << *only;
  }
};

TEST_P(SimTraining, EveryOrderHasTheBitsOfTheSerialRun) {
  const SimConfig& config = GetParam();
  const Trained expected = train_serially(config);
  std::vector<SimOptions> runs;
  if (const auto seed = from_environment("FSDPP_SIM_SEED")) {
    const std::string policy = from_environment("FSDPP_SIM_POLICY").value_or("random");
    runs.push_back({std::stoull(*seed), device::sim_policy_from(policy)});
  } else {
    for (uint64_t index = 0; index < seeds(); ++index) runs.push_back(nth_seed(index));
  }
  for (const SimOptions& options : runs) {
    const std::string wrong = divergence(config, options, expected);
    EXPECT_EQ(wrong, "") << "to see it again:\n  " << reproduction(config, options);
  }
  std::cout << "sim: " << runs.size() << " seeds of " << config.name() << "\n";
}

// The serial run itself against plain libtorch on one process.
TEST_P(SimTraining, TheSerialRunIsTheOracles) {
  const SimConfig& config = GetParam();
  const Trained trained = train_serially(config);
  const std::vector<OracleStep> oracle = integer_oracle(model_of(config), descent_of(config));
  const std::vector<at::Tensor>& expected = oracle.back().weights;
  for (int rank = 0; rank < config.ranks; ++rank) {
    const auto& own = trained.weights[static_cast<std::size_t>(rank)];
    ASSERT_EQ(own.size(), expected.size());
  }
  for (std::size_t i = 0; i < expected.size(); ++i) {
    std::vector<float> joined;
    for (const int owner : owners_in_order(config)) {
      const auto& shard = trained.weights[static_cast<std::size_t>(owner)][i];
      joined.insert(joined.end(), shard.begin(), shard.end());
    }
    const auto* first = expected[i].const_data_ptr<float>();
    EXPECT_EQ(joined, std::vector<float>(first, first + expected[i].numel())) << "parameter " << i;
  }
}

// What must be there: without it some seed goes wrong.
struct Needed {
  std::string name;
  SimConfig config;
  std::function<bool(int rank, const Operation&)> dropped;
};

std::vector<Needed> needed() {
  const SimConfig sharded{.strategy = Strategy::optim_grads_params};
  const auto waits = [](LaneKind lane, LaneKind event) {
    return [=](int rank, const Operation& operation) {
      return rank == 0 && operation.kind == OperationKind::wait && operation.lane == lane &&
             operation.event.lane == event;
    };
  };
  const auto signals = [](LaneKind lane, std::string prefix) {
    return [=](int rank, const Operation& operation) {
      return rank == 0 && operation.kind == OperationKind::wait_signal && operation.lane == lane &&
             operation.name.starts_with(prefix);
    };
  };
  return {{"ComputeForGather", sharded, waits(LaneKind::compute, LaneKind::gather)},
          {"GatherForTheLastReader", sharded, waits(LaneKind::gather, LaneKind::compute)},
          {"ReduceForTheGradients", sharded, waits(LaneKind::reduce, LaneKind::compute)},
          {"ComputeForTheReduce", sharded, waits(LaneKind::compute, LaneKind::reduce)},
          {"PeersPulls", sharded, signals(LaneKind::compute, "pulled")},
          {"PeersGradients", sharded, signals(LaneKind::reduce, "ready")},
          {"NeighboursParts", {.ranks = 4, .inner = 2}, signals(LaneKind::gather, "kept")},
          {"PeersPublications", sharded, signals(LaneKind::gather, "published")},
          {"PeersReleases", sharded, signals(LaneKind::gather, "released")}};
}

class SimNeeds : public ::testing::TestWithParam<Needed> {};

TEST_P(SimNeeds, WithoutItSomeSeedGoesWrong) {
  at::set_num_threads(1);
  const Trained expected = train_serially(GetParam().config);
  std::map<std::string, int> wrong;
  for (uint64_t index = 0; index < kSeeds; ++index) {
    const SimOptions options = nth_seed(index);
    const bool differs =
        !divergence(GetParam().config, options, expected, {.dropped = GetParam().dropped}).empty();
    wrong[device::to_string(options.policy)] += differs ? 1 : 0;
  }
  int all = 0;
  for (const auto& [policy, count] : wrong) {
    std::cout << "sim: " << GetParam().name << " dropped: " << count << " of " << kSeeds / 3
              << " seeds went wrong with policy " << policy << "\n";
    all += count;
  }
  EXPECT_GT(all, 0);
}

INSTANTIATE_TEST_SUITE_P(Waits, SimNeeds, ::testing::ValuesIn(needed()),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Configurations, SimTraining, ::testing::ValuesIn(sim_configs()),
                         [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace fsdpp::test
