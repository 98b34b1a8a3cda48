// What is left when one wait is removed from the schedule. The program runs itself again as a child whose
// rank 0 sums rank 1's gradient slot without waiting for it; the sanitizer of the build must report it there,
// and without one the sum is wrong. The child with all its waits is the control.
#include <cstdlib>
#include <iostream>

#include "tests/dist/rank_process.h"
#include "tests/support/gate_device.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test {
namespace {

using device::Operation;
using device::OperationKind;

constexpr int64_t kDim = 8;
constexpr int kRightSum = 0;
constexpr int kWrongSum = 3;
constexpr int kFaultyReduce =
    3;  // the word that says "this rank contributes" is kept for two reduces: it says so
constexpr const char* kUnit = "block1";

// Rank 0 reads while rank 1 stands before the beginning of its slot's life: it has seen all that it waits
// for, and has written nothing. The gates order the threads in time alone.
struct Fault {
  Gate at_the_slot;
  Gate summed;

  void in_rank_0(GateDevice& lanes) {
    lanes.dropped = [](const Operation& operation) {
      return is(operation, OperationKind::wait_signal, text("ready ", kUnit)) &&
             operation.sequence == kFaultyReduce;
    };
    lanes.before = [this, sums = 0](const Operation& operation) mutable {
      if (is(operation, OperationKind::signal, text("ready ", kUnit)))
        sums = static_cast<int>(operation.sequence);
      if (sums == kFaultyReduce && is(operation, OperationKind::run, text("reduce ", kUnit)))
        at_the_slot.pass("slot");
    };
    lanes.after = [this](const Operation& operation) {
      if (is(operation, OperationKind::signal, text("pulled ", kUnit)) &&
          operation.sequence == kFaultyReduce) {
        summed.open();
      }
    };
  }
  void in_rank_1(GateDevice& lanes) {
    lanes.before = [this, lives = 0](const Operation& operation) mutable {
      if (!is(operation, OperationKind::acquire, text("slot ", kUnit)) || ++lives < kFaultyReduce) return;
      at_the_slot.open();
      summed.pass("sum");
    };
  }
};

// Four steps on two ranks; returns whether every sum was right.
int train(bool faulty) {
  Fault fault;
  std::atomic<bool> right{true};
  comm::run_thread_ranks(2, [&](comm::PeerGroup& group) {
    auto lanes = std::make_unique<GateDevice>();
    if (faulty && group.rank() == 0) fault.in_rank_0(*lanes);
    if (faulty && group.rank() == 1) fault.in_rank_1(*lanes);
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = fully_shard(group, net, net->units(), sharded_sum(), std::move(lanes));
    for (int step = 0; step < 4; ++step) {
      small_loss(net->run(small_batch(kDim, group.rank(), step))).backward();
      SmallNet oracle(3, kDim, Layers::oracle);
      oracle_backward(oracle, all_batches(kDim, 2, step));
      const std::vector<at::Tensor> gradients = model->full_gradients();
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        const at::Tensor expected = oracle.named_parameters()[model->parameters()[i].first].grad();
        if (!at::equal(gradients[i], expected)) right = false;
      }
      model->zero_grad();
    }
  });
  return right ? kRightSum : kWrongSum;
}

struct Outcome {
  int code;
  std::string output;
};

Outcome run_child(const std::string& schedule) {
  RankProcess child({{"FSDPP_TEST_BODY", schedule}});
  const int code = child.wait(std::chrono::minutes(5));
  return {code, child.output()};
}

TEST(RemovedWait, TheWholeScheduleIsCleanAndRight) {
  const Outcome outcome = run_child("whole");
  EXPECT_EQ(outcome.code, kRightSum) << outcome.output;
  EXPECT_EQ(outcome.output.find("Sanitizer"), std::string::npos) << outcome.output;
}

TEST(RemovedWait, OneWaitLessIsReported) {
  const Outcome outcome = run_child("one wait less");
#if defined(__SANITIZE_THREAD__)
  EXPECT_NE(outcome.code, kRightSum);
  EXPECT_NE(outcome.code, kWrongSum);
  expect_in(outcome.output, "WARNING: ThreadSanitizer: data race");
#elif defined(__SANITIZE_ADDRESS__)
  EXPECT_NE(outcome.code, kRightSum);
  EXPECT_NE(outcome.code, kWrongSum);
  expect_in(outcome.output, "ERROR: AddressSanitizer: use-after-poison");
#else
  EXPECT_EQ(outcome.code, kWrongSum) << outcome.output;
#endif
}

}  // namespace
}  // namespace fsdpp::test

int main(int argc, char** argv) {
  if (const char* const body = std::getenv("FSDPP_TEST_BODY")) {
    try {
      return fsdpp::test::train(std::string(body) == "one wait less");
    } catch (const std::exception& error) {
      std::cerr << error.what() << "\n";
      return 1;
    }
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
