// The traps of the design's part on peers and slots: each test fails where the simple way is taken.
#include <array>
#include <map>
#include <mutex>

#include "fsdpp/trace/recorder.h"
#include "tests/dist/traps.h"

namespace fsdpp::test::traps {
namespace {

using device::Operation;
using device::OperationKind;

// Rank 1 is in the middle of its pulls when rank 0 writes its main weights, and until rank 0 wants to publish
// again.
TEST(TrapPublish, OptimizerStepsWhileASlowPeerStillPulls) {
  Gate wants_to_publish;
  run_watched_ranks(2, [&](comm::PeerGroup& group) {
    const at::NoGradGuard no_grad;
    const Sharded made = shard(group, 2, sharded_sum());
    SmallNet oracle(2, kDim, Layers::oracle);
    made.lanes->before = [&](const Operation& operation) {
      if (group.rank() == 0 && is(operation, OperationKind::wait_signal, "released") &&
          operation.sequence == 2) {
        wants_to_publish.open();
      }
      if (group.rank() == 1 && is(operation, OperationKind::copy, "gather block1"))
        wants_to_publish.pass("step");
    };
    const at::Tensor input = small_batch(kDim, 0);
    expect_same(made.net->run(input), oracle.run(input), "output of the weights published at first");
    for (at::Tensor shard : made.model->shards()) shard.add_(1);
    for (at::Tensor weight : oracle.parameters()) weight.add_(1);
    expect_same(made.net->run(input), oracle.run(input), "output after the step");
  });
  EXPECT_TRUE(wants_to_publish.is_open());
}

// Rank 1 still sums the root's slots of the first backward when rank 0's second backward wants to write
// there.
TEST(TrapSlots, ASlotIsNotWrittenWhileASlowPeerStillPulls) {
  Gate wants_slot;
  run_watched_ranks(2, [&](comm::PeerGroup& group) {
    const Sharded made = shard(group, 2, sharded_sum());
    made.model->promise_to_tell();  // no publication between the backwards: it would wait, too
    made.lanes->before = [&](const Operation& operation) {
      if (group.rank() == 0 && is(operation, OperationKind::wait_signal, "pulled root") &&
          operation.sequence == 1) {
        wants_slot.open();
      }
      if (group.rank() == 1 && is(operation, OperationKind::run, "reduce root")) wants_slot.pass("slot");
    };
    SmallNet oracle(2, kDim, Layers::oracle);
    for (int index = 0; index < 2; ++index) {
      backward(made, group.rank(), index);
      oracle_backward(oracle, all_batches(kDim, 2, index));
    }
    expect_gradients(*made.model, oracle);
  });
  EXPECT_TRUE(wants_slot.is_open());
}

// After two equal steps the slots are planned as tightly as they can be; then each rank leaves out other
// blocks.
TEST(TrapReduce, RankDependentUnusedUnitsWithTheSmallestPlan) {
  for (const int ranks : {2, 3, 4}) {
    std::mutex mutex;
    std::map<int, std::vector<std::string>> orders;
    int64_t spills = 0;
    run_watched_ranks(ranks, [&](comm::PeerGroup& group) {
      const int64_t blocks = 8;
      const Sharded made = shard(group, blocks, sharded_sum());
      trace::Recorder recorder;
      const auto step = [&](int index, const std::function<std::set<int>(int)>& skipped) {
        SmallNet oracle(blocks, kDim, Layers::oracle);
        made.net->skipped = skipped(group.rank());
        backward(made, group.rank(), index);
        for (int rank = 0; rank < ranks; ++rank) {
          oracle.skipped = skipped(rank);
          oracle_backward(oracle, {small_batch(kDim, rank, index)});
        }
        expect_gradients(*made.model, oracle);
        made.model->zero_grad();
      };
      for (int index = 0; index < 3; ++index) step(index, [](int) { return std::set<int>(); });
      int64_t all_slots = 0;
      for (const auto& unit : made.model->units()) all_slots += unit.bytes;
      EXPECT_LT(made.model->memory().by_purpose().at("gradient slots"), all_slots / 2) << "not a small plan";
      made.lanes->observe(&recorder);
      step(3, [](int rank) { return std::set<int>{rank, 7 - rank}; });
      step(4, [](int rank) { return rank == 0 ? std::set<int>{} : std::set<int>{1, 2, 3, 4, 5, 6}; });
      step(5,
           [](int rank) { return rank == 0 ? std::set<int>{0, 1, 2, 3, 4, 5, 6, 7} : std::set<int>{rank}; });
      step(6, [](int) { return std::set<int>(); });
      made.lanes->unobserve(&recorder);
      const std::lock_guard lock(mutex);
      spills += made.model->counters().spills;
      orders[group.rank()] = recorder.names([](const Operation& operation) {
        return operation.kind == OperationKind::signal && operation.name.starts_with("ready ");
      });
    });
    EXPECT_GT(spills, 0) << "the plan left room for everything: the test is too easy";
    EXPECT_EQ(orders[0].size(), 4U * 9U);
    for (int rank = 1; rank < ranks; ++rank) EXPECT_EQ(orders[rank], orders[0]) << "rank " << rank;
  }
}

}  // namespace
}  // namespace fsdpp::test::traps
