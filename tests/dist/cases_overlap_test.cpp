// Overlap, proven by the order of operations and by what the compute lane was told to wait for.
#include "fsdpp/trace/recorder.h"
#include "tests/support/gate_device.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test {
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

}  // namespace
}  // namespace fsdpp::test
