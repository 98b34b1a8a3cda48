// Overlap, proven by the order of operations and by what the compute lane was told to wait for.
#include "fsdpp/trace/recorder.h"
#include "tests/support/gate_device.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::cases_overlap_test {
namespace {

using device::LaneKind;
using device::Operation;
using device::OperationKind;

constexpr int64_t kDim = 8;

// Positions in the order of issue, and what the compute lane was told to wait for in between.
class Schedule {
 public:
  explicit Schedule(const std::vector<Operation>& operations) : operations_(operations) {}

  [[nodiscard]] std::size_t find(OperationKind kind, const std::string& name, std::size_t from = 0) const {
    for (std::size_t i = from; i < operations_.size(); ++i) {
      if (is(operations_[i], kind, name)) return i;
    }
    ADD_FAILURE() << "no " << device::to_string(kind) << " " << name << " after operation " << from;
    return operations_.size();
  }
  // The compute lane passes `until` without waiting for operation `index` of another lane.
  [[nodiscard]] bool free_of(std::size_t index, std::size_t until) const {
    for (std::size_t i = index; i < until; ++i) {
      const Operation& wait = operations_[i];
      if (wait.kind == OperationKind::wait && wait.lane == LaneKind::compute &&
          wait.event.lane == operations_[index].lane && wait.event.position >= operations_[index].position) {
        return false;
      }
    }
    return true;
  }

 private:
  const std::vector<Operation>& operations_;
};

TEST(CasesOfOrder, Case44PrefetchAndReduceOverlapCompute) {
  for (const int ranks : {2, 4}) {
    run_watched_ranks(ranks, [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(5, kDim, Layers::fused);
      const auto model = watched_shard(group, net, net->units(), sharded_sum());
      for (std::size_t i = 0; i < net->blocks.size(); ++i) {
        net->blocks[i]->on_forward = [&device = model->device(), i] {
          device.announce(LaneKind::compute, text("compute block", i), {});
        };
      }
      trace::Recorder recorder;
      for (int step = 0; step < 3; ++step) {  // the first by structure, the last as replayed
        recorder.clear();
        model->device().observe(&recorder);
        const at::Tensor loss = small_loss(net->run(small_batch(kDim, group.rank())));
        const std::size_t forward_end = recorder.operations().size();
        loss.backward();
        model->device().unobserve(&recorder);
        const Schedule schedule(recorder.operations());
        for (int i = 0; i + 1 < 5; ++i) {
          SCOPED_TRACE(text("step ", step, ", block ", i));
          const std::size_t compute = schedule.find(OperationKind::run, text("compute block", i));
          const std::size_t gather = schedule.find(OperationKind::copy, text("gather block", i + 1));
          EXPECT_LT(gather, compute);
          EXPECT_TRUE(schedule.free_of(gather, compute)) << "compute waits for the gather of the next unit";
          EXPECT_FALSE(
              schedule.free_of(gather, schedule.find(OperationKind::run, text("compute block", i + 1))));
        }
        for (int i = 4; i > 0; --i) {
          SCOPED_TRACE(text("step ", step, ", backward of block ", i));
          const std::size_t wgrad = schedule.find(OperationKind::run, text("wgrad block", i, ".down.weight"));
          const std::size_t gather =
              schedule.find(OperationKind::copy, text("gather block", i - 1), forward_end);
          EXPECT_LT(gather, wgrad);
          EXPECT_TRUE(schedule.free_of(gather, wgrad)) << "compute waits for the gather of the next unit";
          const std::size_t reduce = schedule.find(OperationKind::run, text("reduce block", i));
          const std::size_t next =
              schedule.find(OperationKind::run, text("wgrad block", i - 1, ".up.weight"));
          EXPECT_LT(reduce, next);
          EXPECT_TRUE(schedule.free_of(reduce, next)) << "compute waits for the reduce just launched";
        }
        integer_step(model->shards());
        model->zero_grad();
      }
    });
  }
}

// Blocks whose gather was launched before `block` computed, counted from the next one on.
int gathered_ahead(const Schedule& schedule, int block, int blocks, std::size_t from = 0) {
  const std::size_t compute = schedule.find(OperationKind::run, text("compute block", block), from);
  int ahead = 0;
  while (block + ahead + 1 < blocks &&
         schedule.find(OperationKind::copy, text("gather block", block + ahead + 1), from) < compute) {
    ++ahead;
  }
  return ahead;
}

TEST(CasesOfOrder, Case43ThePrefetchBudgetIsACap) {
  constexpr int kBlocks = 5;
  const int64_t block_bytes = [] {
    int64_t bytes = 0;
    run_watched_ranks(1, [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(1, kDim, Layers::fused);
      bytes = watched_shard(group, net, net->units(), sharded_sum())->units().at(1).bytes;
    });
    return bytes;
  }();
  struct Budget {
    int64_t bytes;
    int ahead;
  };
  for (const Budget budget : {Budget{0, 0}, Budget{block_bytes - 1, 0}, Budget{2 * block_bytes, 2},
                              Budget{3 * block_bytes - 1, 2}, Budget{int64_t{1} << 40, kBlocks}}) {
    run_watched_ranks(2, [&](comm::PeerGroup& group) {
      SCOPED_TRACE(text("budget of ", budget.bytes, " bytes"));
      const auto net = std::make_shared<SmallNet>(kBlocks, kDim, Layers::fused);
      Options options = sharded_sum();
      options.prefetch_bytes = budget.bytes;
      const auto model = watched_shard(group, net, net->units(), options);
      SmallNet oracle(kBlocks, kDim, Layers::oracle);
      for (std::size_t i = 0; i < net->blocks.size(); ++i) {
        net->blocks[i]->on_forward = [&device = model->device(), i] {
          device.run(LaneKind::compute, text("compute block", i), {}, [] {});
        };
      }
      for (int step = 0; step < 3; ++step) {
        trace::Recorder recorder;
        model->device().observe(&recorder);
        const at::Tensor loss = small_loss(net->run(small_batch(kDim, group.rank(), step)));
        const std::size_t forward_end = recorder.operations().size();
        loss.backward();
        model->device().unobserve(&recorder);
        const Schedule schedule(recorder.operations());
        for (int block = 0; block < kBlocks; ++block) {
          EXPECT_EQ(gathered_ahead(schedule, block, kBlocks), std::min(budget.ahead, kBlocks - 1 - block))
              << "before block " << block << ", step " << step;
        }
        for (int block = kBlocks - 2; block > 0; --block) {  // the last block stays from the forward
          const std::size_t wgrad =
              schedule.find(OperationKind::run, text("wgrad block", block, ".down.weight"), forward_end);
          const std::size_t gather =
              schedule.find(OperationKind::copy, text("gather block", block - 1), forward_end);
          EXPECT_EQ(gather < wgrad, budget.ahead > 0) << "backward of block " << block << ", step " << step;
        }
        oracle_backward(oracle, all_batches(kDim, 2, step));
        expect_gradients(*model, oracle);
        model->zero_grad();
        clear(oracle);
      }
      EXPECT_EQ(model->counters().weight_overflows, 0) << "the plan knows how far ahead gathers are";
    });
  }
}

}  // namespace
}  // namespace fsdpp::test::cases_overlap_test
