// Cases of what waits for what between compute and reduce (numbers: the project's list of cases).
#include "fsdpp/trace/recorder.h"
#include "tests/support/gate_device.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::cases_order_test {
namespace {

using device::LaneKind;
using device::Operation;
using device::OperationKind;

constexpr int64_t kDim = 8;

class CasesOfWaits : public OnRanks {
 public:
  // Rank 0 can go on while the last rank's lanes stand: it is none of its replicas', and keeps no whole sums.
  static bool can_be_ahead() { return ranks() > 1 && !hybrid() && sharded(); }
};
INSTANTIATE_TEST_SUITE_P(Strategies, CasesOfWaits, all_ranks(), parameters_name);

void backward(SmallNet& net, int rank, int index = 0) {
  small_loss(net.run(small_batch(kDim, rank, index))).backward();
}

// Reads every gradient on the compute lane, which the hazard checker compares with what the reduce lane
// wrote.
std::vector<at::Tensor> read_on_compute(ShardedModel& model) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& shard : model.shards()) {
    const at::Tensor gradient = shard.grad();
    copies.push_back(at::zeros_like(gradient));
    if (gradient.numel() == 0) continue;
    const ByteRange bytes{gradient.const_data_ptr(), static_cast<std::size_t>(gradient.nbytes())};
    model.device().run(LaneKind::compute, "read a gradient", {{bytes}, {}},
                       [copy = copies.back(), gradient] { at::Tensor(copy).copy_(gradient); });
  }
  return copies;
}

// The last rank's reduces stand still until rank 0 has read its own gradients.
TEST_P(CasesOfWaits, Case09AGradientReadRightAfterTheBackwardIsWhole) {
  Gate read;
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    auto lanes = std::make_unique<GateDevice>();
    const bool slow = can_be_ahead() && group.rank() == ranks() - 1;
    lanes->before = [&read, slow](const Operation& operation) {
      if (slow && is(operation, OperationKind::run, "reduce root")) read.pass("rank 0's gradients");
    };
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), options(), std::move(lanes));
    SmallNet oracle(3, kDim, Layers::oracle);
    for (int step = 0; step < 3; ++step) {
      backward(*net, group.rank(), step);
      const std::vector<at::Tensor> copies = read_on_compute(*model);
      if (group.rank() == 0) read.open();
      oracle_backward(oracle, all_batches(kDim, ranks(), step));
      expect_gradients(*model, oracle);
      for (std::size_t i = 0; i < copies.size(); ++i)
        expect_same(copies[i], model->shards()[i].grad(), text("what was read of gradient ", i));
      model->zero_grad();
      clear(oracle);
    }
  });
}

// Where `what` of the compute lane stands in `operations` from `first` on.
std::size_t find(const std::vector<Operation>& operations, std::size_t first, OperationKind kind,
                 const std::string& what) {
  for (std::size_t i = first; i < operations.size(); ++i) {
    if (operations[i].lane == LaneKind::compute && is(operations[i], kind, what)) return i;
  }
  ADD_FAILURE() << "no " << device::to_string(kind) << " " << what << " after operation " << first;
  return operations.size();
}

// The root comes first in the backward, before its children, and its last layer is fused: what it writes has
// a place only when the reduce lane is done with what lay there.
TEST_P(CasesOfWaits, Case18TheFirstFusedWriteOfABackwardWaitsForTheReduceLane) {
  Gate wants_the_slot;
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    auto lanes = std::make_unique<GateDevice>();
    const bool slow = can_be_ahead() && group.rank() == ranks() - 1;
    lanes->before = [&, slow](const Operation& operation) {
      if (group.rank() == 0 && is(operation, OperationKind::wait_signal, "pulled root") &&
          operation.sequence == 1) {
        wants_the_slot.open();
      }
      if (slow && is(operation, OperationKind::run, "reduce root")) wants_the_slot.pass("slot of the root");
    };
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), options(), std::move(lanes));
    model->promise_to_tell();  // no publication between the backwards: it would wait, too
    SmallNet oracle(3, kDim, Layers::oracle);
    trace::Recorder recorder;
    model->device().observe(&recorder);
    std::size_t second = 0;  // where the second backward begins
    for (int index = 0; index < 2; ++index) {
      const at::Tensor loss = small_loss(net->run(small_batch(kDim, group.rank(), index)));
      second = recorder.operations().size();
      loss.backward();
      oracle_backward(oracle, all_batches(kDim, ranks(), index));
    }
    model->device().unobserve(&recorder);
    const auto& operations = recorder.operations();
    const auto wrote = recorder.names([](const Operation& operation) {
      return operation.kind == OperationKind::run && operation.name.starts_with("wgrad ");
    });
    if (!GetParam().late) {
      EXPECT_TRUE(wrote.at(0).starts_with("wgrad last.")) << wrote.at(0);
      const std::size_t taken = find(operations, second, OperationKind::acquire, "slot root");
      EXPECT_LT(taken, find(operations, second, OperationKind::run, wrote.at(0)));
      if (ranks() > 1 && GetParam().replicas < ranks()) {
        EXPECT_LT(find(operations, 0, OperationKind::wait_signal, "pulled root"), taken);
      }
    }
    expect_gradients(*model, oracle);
  });
  EXPECT_EQ(wants_the_slot.is_open(), ranks() > 1 && GetParam().replicas < ranks());
}

// Host lanes that count how often they are asked whether the host is too far ahead of the compute lane.
class AskedDevice final : public device::Device {
 public:
  [[nodiscard]] bool runs_inline() const noexcept override { return true; }
  void stay_near() override { ++asked; }
  int asked = 0;

 protected:
  void submit(const Operation& /*operation*/, Work work) override {
    if (work) work();
  }
};

// What keeps the host near is the device's; it is asked for each unit, also where nothing is gathered.
TEST_P(CasesOfWaits, Case46EachUnitAndPassAsksWhetherTheHostIsTooFarAhead) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    auto lanes = std::make_unique<AskedDevice>();
    const int& asked = lanes->asked;
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), options(), std::move(lanes));
    for (int step = 0; step < 3; ++step) {
      const int before = asked;
      const at::Tensor loss = small_loss(net->run(small_batch(kDim, group.rank(), step)));
      EXPECT_EQ(asked - before, 4) << "in the forward";
      loss.backward();
      EXPECT_EQ(asked - before, 8) << "and in the backward";
    }
  });
}

}  // namespace
}  // namespace fsdpp::test::cases_order_test
