// Room for embedding rows: it grew with every forward that had no backward, a graph that was gone through
// twice ended the process, and so did an allocation that failed.
#include <algorithm>

#include "tests/support/hazard_watch.h"
#include "tests/support/noting_lanes.h"
#include "tests/support/row_model.h"

namespace fsdpp::test::row_room_test {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kTokens = 6;

std::shared_ptr<ShardedModel> shard(comm::PeerGroup& group, const std::shared_ptr<RowModel>& module,
                                    bool delay = false) {
  return watched_shard(group, module, {{.modules = {module->table}, .use = runtime::Use::rows}},
                       {.combine = Combine::sum, .row_exchange_bytes = 0, .delay_wgrad = delay});
}

at::Tensor loss_of(RowModel& module, int rank, int step) {
  return small_loss(call(module, row_tokens(rank, step, kTokens)));
}

void expect_step(ShardedModel& model, RowModel& oracle, int step) {
  for (int rank = 0; rank < kRanks; ++rank) loss_of(oracle, rank, step).backward();
  expect_gradients(model, oracle);
  model.zero_grad();
  clear(oracle);
}

TEST(RowRoom, IsNotTakenForGraphsThatWereDropped) {
  Asked asked;
  run_watched_ranks(kRanks, [&](comm::PeerGroup& group) {
    group.set_lanes(std::make_unique<NotingLanes>(group, asked, group.rank()));
    const auto module = std::make_shared<RowModel>(Layers::fused);
    const auto model = shard(group, module);
    RowModel oracle(Layers::oracle);
    loss_of(*module, group.rank(), 0).backward();
    expect_step(*model, oracle, 0);
    const std::vector<std::string> before = asked.of(group.rank());
    at::Tensor loss;  // the last step's graph lives on while the next one is made
    for (int step = 1; step < 4; ++step) {
      for (int evaluation = 0; evaluation < 3; ++evaluation)
        static_cast<void>(loss_of(*module, group.rank(), 10 + evaluation));
      loss = loss_of(*module, group.rank(), step);
      loss.backward();
      expect_step(*model, oracle, step);
    }
    EXPECT_EQ(asked.of(group.rank()), before);
  });
}

// Two graphs that both live have room for both.
TEST(RowRoom, IsTakenForAllGraphsThatLive) {
  run_watched_ranks(kRanks, [](comm::PeerGroup& group) {
    const auto module = std::make_shared<RowModel>(Layers::fused);
    const auto model = shard(group, module, /*delay=*/true);
    RowModel oracle(Layers::oracle);
    for (int step = 0; step < 3; ++step) {
      std::vector<at::Tensor> losses;
      for (int index = 0; index <= step; ++index) {
        const auto scope = model->microbatch(index == step);
        losses.push_back(loss_of(*module, group.rank(), index));
      }
      for (const at::Tensor& loss : losses) loss.backward();
      model->backward_dw();
      for (int index = 0; index < step; ++index) {
        for (int rank = 0; rank < kRanks; ++rank) loss_of(oracle, rank, index).backward();
      }
      expect_step(*model, oracle, step);
    }
  });
}

TEST(RowRoom, AGraphGoneThroughTwiceGivesTwiceTheGradient) {
  run_watched_ranks(kRanks, [](comm::PeerGroup& group) {
    const auto module = std::make_shared<RowModel>(Layers::fused);
    const auto model = shard(group, module);
    RowModel oracle(Layers::oracle);
    const at::Tensor loss = loss_of(*module, group.rank(), 0);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    for (int rank = 0; rank < kRanks; ++rank) loss_of(oracle, rank, 0).backward();
    expect_step(*model, oracle, 0);
  });
}

TEST(RowRoom, AGraphGoneThroughTwiceBeforeAReduceIsRefused) {
  run_watched_ranks(kRanks, [](comm::PeerGroup& group) {
    const auto module = std::make_shared<RowModel>(Layers::fused);
    const auto model = shard(group, module, /*delay=*/true);
    const at::Tensor loss = loss_of(*module, group.rank(), 0);
    loss.backward({}, /*retain_graph=*/true);
    expect_in(thrown_text<UsageError>([&] { loss.backward(); }), "gone through twice");
  });
}

// Lanes whose second growth of rows fails.
class ShortLanes final : public comm::LaneTransport {
 public:
  explicit ShortLanes(comm::PeerGroup& group) : group_(group) {}
  std::shared_ptr<comm::PeerMemory> allocate(std::size_t bytes, const std::string& purpose) override {
    if (purpose == "embedding rows" && ++growths_ == 2) throw EnvironmentError("no room for " + purpose);
    return group_.allocate(bytes, purpose);
  }
  std::unique_ptr<comm::LaneSignals> signals(std::vector<std::string> names,
                                             const std::string& purpose) override {
    return group_.signals(std::move(names), purpose);
  }
  std::unique_ptr<comm::LaneTransport> for_part(comm::PeerGroup& part) override {
    return std::make_unique<ShortLanes>(part);
  }
  [[nodiscard]] std::string describe() const override { return group_.describe(); }

 private:
  comm::PeerGroup& group_;
  int growths_ = 0;
};

TEST(RowRoom, WhereItFailsWhatThereIsStays) {
  run_watched_ranks(kRanks, [](comm::PeerGroup& group) {
    group.set_lanes(std::make_unique<ShortLanes>(group));
    const auto module = std::make_shared<RowModel>(Layers::fused);
    const auto model = shard(group, module);
    RowModel oracle(Layers::oracle);
    loss_of(*module, group.rank(), 0).backward();
    expect_step(*model, oracle, 0);
    const int64_t held = model->memory().current();
    const std::string message = thrown_text<EnvironmentError>(
        [&] { static_cast<void>(call(*module, row_tokens(group.rank(), 1, 10 * kTokens))); });
    expect_in(message, "no room for embedding rows");
    EXPECT_EQ(model->memory().current(), held);
    loss_of(*module, group.rank(), 2).backward();
    expect_step(*model, oracle, 2);
  });
}

}  // namespace
}  // namespace fsdpp::test::row_room_test
