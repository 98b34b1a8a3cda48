// Faults on a live device: every wait, record and wait_signal of a schedule that the runtime issued, left out
// one at a time. What the checker and brute force call redundant must change nothing under any seed; of what
// they report, it is counted how much really goes wrong.
//
//   FSDPP_SIM_MUTANTS=all    every one of them, instead of a sample
//   FSDPP_SIM_MUTANTS=text   those whose description has that text, as "gather #119"
//   FSDPP_SIM_SEEDS=n        seeds of each, 200 unless said
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>

#include "fsdpp/base/error.h"
#include "tests/sim/kept_memory.h"
#include "tests/sim/sim_training.h"
#include "tests/support/closure.h"

namespace fsdpp::test {
namespace {

using device::LaneKind;
using device::Operation;
using device::OperationKind;
using device::SimOptions;
using runtime::Strategy;

uint64_t seeds() { return seeds_asked_for(200); }

Schedule recorded(const SimConfig& config, SimOptions options) {
  const KeptMemory kept;
  ScheduleRecorder recorder(config.ranks);
  (void)train_simulated(config, options, {.recorder = &recorder});
  return recorder.schedule();
}

// A mutant on a live device. Without a record nobody waits for it.
SimExtras without(const Step& step) {
  return {.dropped = [rank = step.rank, lost = step.operation](int other, const Operation& operation) {
    if (other != rank) return false;
    if (operation.lane == lost.lane && operation.position == lost.position) return true;
    return lost.kind == OperationKind::record && operation.kind == OperationKind::wait &&
           operation.event.lane == lost.lane && operation.event.position == lost.position;
  }};
}

// What a mutant is about, without numbers.
std::string family(const Mutant& mutant, const Operation& operation) {
  std::string what = operation.name.substr(0, operation.name.find(' '));
  if (operation.kind == OperationKind::wait) what = text("for ", device::to_string(operation.event.lane));
  return text(mutant.kind, ": ", device::to_string(operation.lane), " ", what);
}

// Why a fault that the checker reports changes no bit on these lanes, whatever their order; empty: it should.
std::string reason(const Schedule& schedule, std::size_t index, const std::string& found) {
  const Operation& lost = schedule[index].operation;
  const auto says = [&](const char* part) { return found.find(part) != std::string::npos; };
  if (says("lane not rejoined")) return "no byte depends on it, only a recorded graph of the step does";
  if (lost.lane == LaneKind::host && lost.kind == OperationKind::wait_signal)
    return "the work of the host's signal is the barrier itself";
  if (says("memory released too early") && says(" release weights "))
    return "the use that is too late is the mark of a release: it touches no byte";
  if (says("which raises its own")) return "these lanes wait for numbers and do not compare counters";
  const bool updated = std::any_of(
      schedule.begin(), schedule.begin() + static_cast<std::ptrdiff_t>(index), [&](const Step& step) {
        return step.rank == schedule[index].rank && step.operation.name.starts_with("descend");
      });
  if (says(" run update ") && !updated)
    return "no optimizer has run yet: an update is announced before every publication";
  return {};
}

struct Kind {
  int all = 0;
  int run = 0;
  int diverged = 0;
  std::string reason;  // why some did not
};
using Kinds = std::map<std::string, Kind>;

void print(const std::string& title, const Kinds& kinds) {
  Kind sum;
  for (const auto& [name, kind] : kinds) {
    sum.all += kind.all;
    sum.run += kind.run;
    sum.diverged += kind.diverged;
  }
  std::cout << "  " << title << ": " << sum.all << ", of which run " << sum.run << ", of which went wrong "
            << sum.diverged << "\n";
  for (const auto& [name, kind] : kinds) {
    std::cout << "    " << name << ": " << kind.all << ", run " << kind.run << ", wrong " << kind.diverged
              << "\n";
    if (!kind.reason.empty()) std::cout << "      right under every seed: " << kind.reason << "\n";
  }
}

class SimMutants : public ::testing::TestWithParam<SimConfig> {
 protected:
  void SetUp() override { at::set_num_threads(1); }

  // The first seed under which it goes wrong, as text.
  std::string first_divergence(const Step& step, uint64_t count) {
    for (uint64_t index = 0; index < count; ++index) {
      const std::string wrong = divergence(GetParam(), nth_seed(index), expected_, without(step));
      if (!wrong.empty()) return text("seed ", index, ": ", wrong);
    }
    return {};
  }

  Trained expected_;
};

TEST_P(SimMutants, WhatIsRedundantChangesNothing) {
  const SimConfig& config = GetParam();
  expected_ = train_serially(config);
  const Schedule schedule = recorded(config, nth_seed(0));
  ASSERT_EQ(checked(schedule, config.ranks), "");
  ASSERT_EQ(Closure(schedule).broken(), "");
  std::vector<Mutant> mutants = mutants_of(schedule);
  std::erase_if(mutants,
                [](const Mutant& mutant) { return !mutant.drops || mutant.kind == "signal dropped"; });
  std::shuffle(mutants.begin(), mutants.end(), std::mt19937(1));  // NOLINT: the same sample every time
  const char* const asked = std::getenv("FSDPP_SIM_MUTANTS");
  const bool all = asked != nullptr;
  if (all && std::string(asked) != "all")
    std::erase_if(mutants,
                  [&](const Mutant& mutant) { return mutant.what.find(asked) == std::string::npos; });
  const int most_redundant = all ? INT_MAX : 6;
  const int most_caught = all ? INT_MAX : 24;
  int redundant = 0;
  int caught = 0;
  Kinds kinds[2];
  for (const Mutant& mutant : mutants) {
    const Step& step = schedule[mutant.index];
    const Schedule faulty = mutant.apply(schedule);
    const std::string found = checked(faulty, config.ranks);
    EXPECT_EQ(found.empty(), Closure(faulty).broken().empty()) << mutant.kind << ": " << mutant.what << "\n"
                                                               << found;
    Kind& kind = kinds[found.empty() ? 0 : 1][family(mutant, step.operation)];
    ++kind.all;
    if (found.empty() ? ++redundant > most_redundant : ++caught > most_caught) continue;
    ++kind.run;
    const std::string wrong = first_divergence(step, seeds());
    if (found.empty()) {
      EXPECT_EQ(wrong, "") << mutant.kind << ": " << mutant.what;
    }
    if (!wrong.empty()) ++kind.diverged;
    if (!wrong.empty() || found.empty()) continue;
    const std::string why = reason(schedule, mutant.index, found);
    EXPECT_NE(why, "") << "reported, but right under every seed: " << mutant.kind << ": " << mutant.what
                       << "\n"
                       << found;
    kind.reason = why;
  }
  std::cout << "sim: mutants of " << config.name() << ", " << schedule.size() << " operations, "
            << mutants.size() << " mutants that leave out one, " << seeds() << " seeds each\n";
  print("redundant", kinds[0]);
  print("caught", kinds[1]);
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, SimMutants,
    ::testing::Values(SimConfig{.strategy = Strategy::no_shard}, SimConfig{.strategy = Strategy::optim},
                      SimConfig{
                          .strategy = Strategy::optim_grads, .microbatches = 2, .steps = 2, .replicas = 2},
                      SimConfig{.microbatches = 2, .steps = 2, .replicas = 2, .parted = true},
                      SimConfig{.strategy = Strategy::optim_grads_params},
                      SimConfig{.tied = true, .rows = true}, SimConfig{.late = true},
                      SimConfig{.ranks = 3, .microbatches = 2, .steps = 2}),
    [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace fsdpp::test
