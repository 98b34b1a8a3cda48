// Every configuration trains with the bits of plain libtorch on one process and the whole batch.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/connect.h"
#include "tests/dist/parity_rank.h"
#include "tests/support/hazard_watch.h"

namespace fsdpp {
namespace {

using nn::Recompute;
using runtime::Strategy;
using test::OracleStep;
using test::run_watched_ranks;
using Configuration = test::ParityConfiguration;

std::string name_of(const testing::TestParamInfo<Configuration>& info) { return test::name_of(info.param); }

class Parity : public testing::TestWithParam<Configuration> {};

TEST_P(Parity, TrainsWithTheBitsOfOneProcess) {
  at::set_num_threads(1);  // the ranks are threads already
  const Configuration& c = GetParam();
  const std::vector<OracleStep>& oracle = test::oracle_of(c);
  ASSERT_FALSE(HasFailure()) << "the oracle is not exact: nothing to compare with";
  run_watched_ranks(c.ranks, [&](comm::PeerGroup& group) { test::train_like(oracle, group, c); });
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
    const std::vector<OracleStep>& oracle = test::oracle_of(c);
    run_watched_ranks(ranks, [&](comm::PeerGroup& group) { test::train_like(oracle, group, c); });
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

struct Mesh {
  int ranks;
  int replicas;
  bool parted = false;
  int inner = 0;
};

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
          if (c.bf16_wire && ranks == 3) continue;               // sums beyond bf16's integers
          all.push_back(c);
        }
      });
    }
  };
  for (const int ranks : {1, 2, 3, 4}) add(ranks, 1, false);
  for (const bool parted : {false, true}) add(4, 2, parted);
  return all;
}

// Ways to run a backward, in every strategy and mesh; what else there is takes turns.
std::vector<Configuration> schedules() {
  std::vector<Configuration> all;
  int turn = 0;
  for (const Mesh mesh : {Mesh{2, 1, false}, Mesh{4, 1, false}, Mesh{4, 2, false}, Mesh{4, 2, true}}) {
    for (const Strategy strategy : runtime::kStrategies) {
      if (mesh.parted && !shards_optimizer(strategy)) continue;  // refused
      for (const Recompute recompute : {Recompute::none, Recompute::reentrant, Recompute::non_reentrant}) {
        for (const int which : {0, 1, 2, 3, 4, 5, 6, 7}) {
          Configuration c{mesh.ranks, strategy, turn % 2 == 0 ? 3 : 1};
          c.replicas = mesh.replicas;
          c.parted = mesh.parted;
          c.recompute = recompute;
          c.delayed = (which & 1) != 0;
          c.bf16 = (which & 2) != 0;
          c.tied = (which & 4) != 0;
          c.set_to_none = turn % 3 != 0;
          c.fused = turn % 5 != 0;
          c.late = shards_gradients(strategy) && turn % 7 < 3;
          c.rows = shards_gradients(strategy) && c.fused && turn % 11 < 4;
          c.kept = shards_parameters(strategy) && turn % 4 == 3;
          c.offload = shards_optimizer(strategy) && turn % 6 > 2;
          all.push_back(c);
          turn += which == 7 ? 2 : 1;  // so that what takes turns meets every combination
        }
      }
    }
  }
  return all;
}

// Units with strategies of their own, and with gradients stored in bf16: of integers that it has.
std::vector<Configuration> by_unit() {
  std::vector<Configuration> all;
  int turn = 0;
  for (const Mesh mesh :
       {Mesh{2, 1, false}, Mesh{3, 1, false}, Mesh{4, 1, false}, Mesh{4, 2, false}, Mesh{4, 2, true}}) {
    for (const Strategy strategy : runtime::kStrategies) {
      if (mesh.parted && !shards_optimizer(strategy)) continue;  // refused
      for_each_window([&](int microbatches, bool set_to_none, bool tied) {
        for (const int which : {0, 1, 2, 3}) {
          Configuration c{mesh.ranks, strategy, microbatches, set_to_none, tied};
          c.replicas = mesh.replicas;
          c.parted = mesh.parted;
          c.by_unit = which < 3;
          c.narrow = which > 1;
          if (c.narrow && (c.replicas > 1 || c.ranks == 3)) continue;  // refused; sums beyond bf16's integers
          c.bf16 = c.narrow && turn / 4 % 2 == 0;
          c.fused = turn % 5 != 0;
          c.delayed = turn % 3 == 1;
          c.kept = turn % 6 == 2;
          c.offload = !c.narrow && shards_optimizer(strategy) && turn % 7 > 4;
          c.late = shards_gradients(strategy) && turn % 3 == 0;
          c.rows = shards_gradients(strategy) && c.fused && turn % 2 == 0;
          c.recompute = turn % 8 == 3   ? Recompute::reentrant
                        : turn % 8 == 6 ? Recompute::non_reentrant
                                        : Recompute::none;
          all.push_back(c);
          ++turn;
        }
      });
    }
  }
  return all;
}

// Weights that neighbours keep from the forward on.
std::vector<Configuration> inner() {
  std::vector<Configuration> all;
  int turn = 0;
  for (const Mesh mesh : {Mesh{4, 1, false, 2}, Mesh{4, 1, false, 1}, Mesh{4, 1, false, 4},
                          Mesh{6, 1, false, 3}, Mesh{8, 2, false, 2}}) {
    for_each_window([&](int microbatches, bool set_to_none, bool tied) {
      if (mesh.ranks > 4 && (microbatches == 3 || tied != set_to_none)) return;  // beyond the exact integers
      Configuration c{mesh.ranks, Strategy::optim_grads_params, microbatches, set_to_none, tied};
      c.replicas = mesh.replicas;
      c.inner = mesh.inner;
      for (const bool recompute : {false, true}) {
        c.recompute = recompute ? Recompute::non_reentrant : Recompute::none;
        c.rows = turn % 3 == 0;
        c.offload = turn % 4 == 1;
        c.parted = mesh.replicas > 1 && turn % 2 == 0;
        c.delayed = turn % 5 == 2;
        c.c10d = mesh.ranks == 4 && mesh.inner == 2 && !c.rows && turn % 3 == 1;
        all.push_back(c);
        ++turn;
      }
    });
  }
  return all;
}

// The GPUs of one host: flat, as 2x4 and as 4x2, with neighbours of four and two, and nodes of four and two
// between which c10d talks.
std::vector<Configuration> eight() {
  std::vector<Configuration> all;
  int turn = 0;
  for (const Mesh mesh : {Mesh{8, 1}, Mesh{8, 2}, Mesh{8, 4}, Mesh{8, 2, true}, Mesh{8, 4, true}}) {
    for (const Strategy strategy : runtime::kStrategies) {
      if (mesh.parted && !shards_optimizer(strategy)) continue;  // refused
      for (const bool tied : {false, true}) {
        for (const Recompute recompute : {Recompute::none, Recompute::non_reentrant}) {
          Configuration c{mesh.ranks, strategy, 1, tied, tied};  // more are beyond the exact integers
          c.replicas = mesh.replicas;
          c.parted = mesh.parted;
          c.recompute = recompute;
          c.delayed = turn % 3 == 1;
          c.bf16 = turn % 5 == 3;
          c.fused = turn % 7 != 5;
          c.by_unit = turn % 6 == 4;
          c.c10d = c.replicas > 1 && turn % 4 > 1;
          c.offload = !c.by_unit && shards_optimizer(strategy) && turn % 4 == 1;
          c.late = shards_gradients(strategy) && turn % 2 == 0;
          c.rows = shards_gradients(strategy) && c.fused && turn % 5 < 2;
          c.kept = shards_parameters(strategy) && turn % 3 == 0;
          c.inner = shards_parameters(strategy) && !c.kept && !c.by_unit ? (turn % 2 == 0 ? 2 : 4) : 0;
          if (c.inner >= c.ranks / c.replicas) c.inner = 0;
          all.push_back(c);
          ++turn;
        }
      }
    }
  }
  return all;
}

// A mesh of nodes: peers inside, c10d between them. And where no rank addresses another's memory.
std::vector<Configuration> through_c10d() {
  std::vector<Configuration> all;
  for (const int replicas : {2, 1}) {
    for (const Strategy strategy : runtime::kStrategies) {
      for (const bool parted : {false, true}) {
        if (parted && (replicas == 1 || !shards_optimizer(strategy))) continue;  // refused
        for_each_window([&](int microbatches, bool set_to_none, bool tied) {
          Configuration c{replicas == 1 ? 3 : 4, strategy, microbatches, set_to_none, tied};
          c.replicas = replicas;
          c.parted = parted;
          c.rows = replicas > 1 && shards_gradients(strategy) && tied;
          c.offload = parted && microbatches == 3;
          c.c10d = true;
          all.push_back(c);
        });
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Flat, Parity, testing::ValuesIn(flat()), name_of);
INSTANTIATE_TEST_SUITE_P(Hybrid, Parity, testing::ValuesIn(hybrid()), name_of);
INSTANTIATE_TEST_SUITE_P(Options, Parity, testing::ValuesIn(with_options()), name_of);
INSTANTIATE_TEST_SUITE_P(Schedules, Parity, testing::ValuesIn(schedules()), name_of);
INSTANTIATE_TEST_SUITE_P(ByUnit, Parity, testing::ValuesIn(by_unit()), name_of);
INSTANTIATE_TEST_SUITE_P(Inner, Parity, testing::ValuesIn(inner()), name_of);
INSTANTIATE_TEST_SUITE_P(Eight, Parity, testing::ValuesIn(eight()), name_of);
INSTANTIATE_TEST_SUITE_P(C10d, Parity, testing::ValuesIn(through_c10d()), name_of);

// An axis of the matrix, and which of its values a configuration has.
using Axes = std::map<std::string, std::string>;

Axes axes_of(const Configuration& c) {
  return {{"strategy", runtime::to_string(c.strategy)},
          {"mesh", c.replicas == 1 ? "flat"
                   : c.parted      ? "hybrid, optimizer sharded"
                                   : "hybrid"},
          {"microbatches", std::to_string(c.microbatches)},
          {"gradients", c.set_to_none ? "set to none" : "set to zero"},
          {"recompute", nn::to_string(c.recompute)},
          {"weights", c.tied ? "tied" : "untied"},
          {"layers", c.fused ? "fused" : "unfused"},
          {"dtype", c.bf16 ? "bf16" : "fp32"},
          {"main weights", c.offload ? "on the host" : "with the lanes"},
          {"strategies", c.by_unit ? "by unit" : "one"},
          {"stored gradients", c.narrow ? "bf16" : "fp32"},
          {"wgrad", c.delayed ? "delayed" : "in the backward"}};
}

bool refused(std::string_view a, std::string_view b) {
  const bool unsharded = a == "strategy no_shard" || b == "strategy no_shard";
  const auto either = [&](std::string_view value) { return a == value || b == value; };
  const bool narrow = either("stored gradients bf16");
  const bool hybrid = either("mesh hybrid") || either("mesh hybrid, optimizer sharded");
  if (narrow && (hybrid || either("main weights on the host"))) return true;
  return unsharded && (either("mesh hybrid, optimizer sharded") || either("main weights on the host"));
}

// All but what docs/strategies.md lists as refused.
TEST(ParityMatrix, EveryPairOfAxisValuesIsInIt) {
  std::map<std::string, std::set<std::string>> values;
  std::set<std::array<std::string, 4>> met;
  int on_two = 0;
  int on_four = 0;
  for (const auto& part : {flat(), hybrid(), with_options(), schedules(), by_unit()}) {
    for (const Configuration& c : part) {
      on_two += c.ranks >= 2 ? 1 : 0;
      on_four += c.ranks == 4 ? 1 : 0;
      const Axes axes = axes_of(c);
      for (const auto& [axis, value] : axes) {
        values[axis].insert(value);
        if (c.ranks < 2) continue;
        for (const auto& [other, its] : axes) met.insert({axis, value, other, its});
      }
    }
  }
  for (const auto& [axis, of_axis] : values) {
    for (const auto& [other, of_other] : values) {
      if (axis >= other) continue;
      for (const std::string& a : of_axis) {
        for (const std::string& b : of_other) {
          EXPECT_EQ(met.count({axis, a, other, b}) > 0, !refused(axis + " " + a, other + " " + b))
              << axis << " " << a << ", " << other << " " << b;
        }
      }
    }
  }
  EXPECT_GE(on_two, 300);
  EXPECT_GE(on_four, 100);
  RecordProperty("parity_pairs", static_cast<int>(met.size()));
}

}  // namespace
}  // namespace fsdpp
