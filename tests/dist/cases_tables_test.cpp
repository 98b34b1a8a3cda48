// Cases of embedding tables: where their gradient is written, and what ties them to a head (numbers: the
// project's list of cases).
#include <ATen/ops/embedding.h>

#include <cstring>

#include "fsdpp/nn/embedding.h"
#include "fsdpp/trace/recorder.h"
#include "tests/support/gate_device.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::cases_tables_test {
namespace {

using device::Operation;
using device::OperationKind;

constexpr int64_t kDim = 8;
constexpr int64_t kWords = 11;

class CasesOfTables : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Strategies, CasesOfTables, all_ranks(), parameters_name);

at::Tensor tokens_of(int rank, int index = 0) {
  const auto seed = 50 + static_cast<uint64_t>(rank) + 10 * static_cast<uint64_t>(index);
  return integers({6}, seed, 5).add(5).to(at::kLong);
}

// An embedding's rows add up in the slot itself.
class LookUp : public torch::nn::Module {
 public:
  explicit LookUp(Layers layers) : kind(layers) {
    weight = register_parameter("weight", integers({kWords, kDim}, 3));
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& tokens) const {
    return kind == Layers::fused ? nn::fused_embedding(weight, tokens) : at::embedding(weight, tokens);
  }
  Layers kind;
  at::Tensor weight;
};

TEST_P(CasesOfTables, Case20AnEmbeddingWritesIntoTheReducesInput) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    LookUp oracle(Layers::oracle);
    small_loss(oracle.forward(tokens_of(group.rank()))).backward();
    const at::Tensor own = oracle.weight.grad().clone();
    auto lanes = std::make_unique<GateDevice>();
    ByteRange slot, written;
    int checked = 0;
    lanes->before = [&](const Operation& operation) {
      if (is(operation, OperationKind::acquire, "slot root")) slot = operation.writes[0];
      if (is(operation, OperationKind::run, "wgrad weight")) written = operation.writes.at(0);
      if (!is(operation, OperationKind::signal, "ready root")) return;
      ASSERT_EQ(written.size, static_cast<std::size_t>(own.nbytes()));
      const auto* first = static_cast<const std::byte*>(written.begin);
      const auto* begin = static_cast<const std::byte*>(slot.begin);
      EXPECT_TRUE(first >= begin && first + written.size <= begin + slot.size);
      EXPECT_EQ(std::memcmp(first, own.const_data_ptr(), written.size), 0) << "when the reduce may begin";
      ++checked;
    };
    const auto table = std::make_shared<LookUp>(Layers::fused);
    const auto model =
        watched_shard(group, table, std::vector<std::shared_ptr<LookUp>>{}, options(), std::move(lanes));
    small_loss(call(*table, tokens_of(group.rank()))).backward();
    EXPECT_EQ(checked, 1);
    for (int rank = 0; rank < ranks(); ++rank) {
      if (rank != group.rank()) small_loss(oracle.forward(tokens_of(rank))).backward();
    }
    expect_gradients(*model, oracle);
  });
}

// The table is the head as well, which is used twice in each forward.
class TiedNet : public torch::nn::Module {
 public:
  TiedNet(Layers table_layers, Layers head_layers) : head_kind(head_layers) {
    table = register_module("table", std::make_shared<LookUp>(table_layers));
    const Layers inside = table_layers == Layers::oracle ? Layers::oracle : Layers::fused;
    block = register_module("block", std::make_shared<SmallBlock>(kDim, inside, 9));
    head = register_parameter("head", table->weight);
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& tokens) const {
    const bool alone = head_kind == Layers::oracle;
    const at::Tensor x = alone ? table->forward(tokens) : fsdpp::call(*table, tokens);
    const at::Tensor y = alone ? block->forward(x) : fsdpp::call(*block, x);
    return SmallLinear::product(head_kind, y, head, {}) + SmallLinear::product(head_kind, x * 2, head, {});
  }
  Layers head_kind;
  std::shared_ptr<LookUp> table;
  std::shared_ptr<SmallBlock> block;
  at::Tensor head;
};

TEST_P(CasesOfTables, Case15ATableThatIsTheHeadIsReducedOnce) {
  for (const bool across : {true, false}) {  // the table is a unit of its own, or the root's like the head
    for (const Layers table : {Layers::fused, Layers::unfused}) {
      for (const Layers head : {Layers::fused, Layers::unfused}) {
        run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
          const auto net = std::make_shared<TiedNet>(table, head);
          std::vector<std::shared_ptr<torch::nn::Module>> units = {net->block};
          if (across) units.insert(units.begin(), net->table);
          const auto model = watched_shard(group, net, units, options());
          TiedNet oracle(Layers::oracle, Layers::oracle);
          trace::Recorder recorder;
          model->device().observe(&recorder);
          for (int step = 0; step < 3; ++step) {
            recorder.clear();
            small_loss(call(*net, tokens_of(group.rank(), step))).backward();
            for (int rank = 0; rank < ranks(); ++rank)
              small_loss(oracle.forward(tokens_of(rank, step))).backward();
            expect_gradients(*model, oracle);
            EXPECT_EQ(recorder.count(OperationKind::signal, "ready root"), 1U);
            EXPECT_EQ(recorder.count(OperationKind::signal, "ready table"), 0U);
            model->zero_grad();
            clear(oracle);
          }
          model->device().unobserve(&recorder);
          EXPECT_TRUE(model->at_rest());
        });
      }
    }
  }
}

}  // namespace
}  // namespace fsdpp::test::cases_tables_test
