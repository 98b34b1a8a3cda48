// The checker against faults: every single one that a missing line of the runtime would make, put into
// schedules that the runtime really issued. Caught, or shown to change nothing by brute force.
#include <ATen/Parallel.h>

#include <iostream>

#include "fsdpp/device/host.h"
#include "tests/support/closure.h"
#include "tests/support/schedule.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test {
namespace {

constexpr int64_t kDim = 16;  // no rank's shard is all padding

// What the runtime issues while it trains a small model: its weights, two microbatches a step, an evaluation.
Schedule recorded(Strategy strategy, int ranks, int steps) {
  ScheduleRecorder recorder(ranks);
  comm::run_thread_ranks(ranks, [&](comm::PeerGroup& group) {
    auto device = std::make_unique<device::HostDevice>();
    device->observe(recorder.observer(group.rank()));
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = fully_shard(group, net, net->units(), {.strategy = strategy, .combine = Combine::sum},
                                   std::move(device));
    for (int step = 0; step < steps; ++step) {
      for (int index = 0; index < 2; ++index) {
        const auto scope = model->microbatch(index == 1);
        small_loss(net->run(small_batch(kDim, group.rank(), index))).backward();
      }
      integer_step(model->shards());
      model->zero_grad();
    }
    const at::NoGradGuard no_grad;
    (void)net->run(small_batch(kDim, group.rank()));
  });
  return recorder.schedule();
}

struct Count {
  int all = 0;
  int caught = 0;
  int redundant = 0;
};

// Under sanitizers, which have nothing to find in loops over lists, only some of the faults.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kStride = 37;
#else
constexpr std::size_t kStride = 1;
#endif

class Tally {
 public:
  void add(const Mutant& mutant, const device::Operation& operation, bool caught) {
    Count& count = counts_[mutant.kind];
    ++count.all;
    ++(caught ? count.caught : count.redundant);
    if (caught || mutant.kind.ends_with("halved")) return;
    const bool waits = operation.kind == device::OperationKind::wait;
    const std::string what = waits ? text("for ", device::to_string(operation.event.lane)) : operation.name;
    ++redundant_[text(mutant.kind, ": ", device::to_string(operation.lane), " ", what)];
  }
  // Reading less is never a hazard; of every other kind some are.
  void expect_some_of_each_caught() const {
    for (const auto& [kind, count] : counts_) {
      if (kind == "read range halved") continue;
      EXPECT_GT(count.caught, 0) << kind;
    }
  }
  void print() const {
    for (const auto& [kind, count] : counts_) {
      std::cout << "  " << kind << ": " << count.all << ", caught " << count.caught << ", redundant "
                << count.redundant << "\n";
    }
    for (const auto& [what, count] : redundant_)
      std::cout << "    redundant: " << count << " x " << what << "\n";
  }

 private:
  std::map<std::string, Count> counts_;
  std::map<std::string, int> redundant_;  // by kind of fault, lane and name of the operation
};

class HazardMutants : public ::testing::TestWithParam<std::tuple<Strategy, int, int>> {};

TEST_P(HazardMutants, EveryFaultIsCaughtUnlessItChangesNothing) {
  at::set_num_threads(1);
  const auto [strategy, ranks, steps] = GetParam();
  const Schedule schedule = recorded(strategy, ranks, steps);
  ASSERT_EQ(checked(schedule, ranks), "");
  ASSERT_EQ(Closure(schedule).broken(), "");
  Tally tally;
  const std::vector<Mutant> mutants = mutants_of(schedule);
  for (std::size_t i = 0; i < mutants.size(); i += kStride) {
    const Mutant& mutant = mutants[i];
    const Schedule faulty = mutant.apply(schedule);
    const std::string found = checked(faulty, ranks);
    const std::string truth = Closure(faulty).broken();
    EXPECT_EQ(found.empty(), truth.empty())
        << mutant.kind << ": " << mutant.what << "\nchecker: " << found << "\nbrute force: " << truth;
    tally.add(mutant, schedule[mutant.index].operation, !found.empty());
  }
  if (kStride == 1) tally.expect_some_of_each_caught();
  std::cout << runtime::to_string(strategy) << ", " << ranks << " ranks, " << steps << " steps, "
            << schedule.size() << " operations, " << mutants.size() << " mutants\n";
  tally.print();
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, HazardMutants,
    ::testing::Values(std::tuple(Strategy::no_shard, 2, 3), std::tuple(Strategy::no_shard, 3, 2),
                      std::tuple(Strategy::optim, 2, 3), std::tuple(Strategy::optim_grads, 2, 3),
                      std::tuple(Strategy::optim_grads_params, 2, 3),
                      std::tuple(Strategy::optim_grads_params, 3, 2)),
    [](const auto& info) {
      return text(runtime::to_string(std::get<0>(info.param)), "_on_", std::get<1>(info.param));
    });

}  // namespace
}  // namespace fsdpp::test
