// A device that does not fit the group's lanes was refused only after the model's weights had moved: they
// were lost.
#include <memory>

#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::weights_stay_test {
namespace {

// The lanes of a GPU, as far as set-up gets.
class OtherDevice final : public device::Device {
 public:
  [[nodiscard]] bool runs_inline() const noexcept override { return true; }
  [[nodiscard]] int gpu() const noexcept override { return 3; }

 private:
  void submit(const device::Operation&, Work) override { FAIL() << "nothing is to run here"; }
};

TEST(WeightsStay, WhereADeviceIsRefused) {
  run_watched_ranks(2, [](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, 8, Layers::fused);
    std::vector<at::Tensor> before;
    for (const at::Tensor& weight : net->parameters()) before.push_back(weight.detach().clone());
    const std::string message = thrown_text<UsageError>([&] {
      static_cast<void>(
          fully_shard(group, net, {{.modules = {net->blocks.front()}}}, {}, std::make_unique<OtherDevice>()));
    });
    expect_in(message, "GPU 3");
    const std::vector<at::Tensor> after = net->parameters();
    ASSERT_EQ(after.size(), before.size());
    for (std::size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(after[i].equal(before[i])) << i;
    const auto model = watched_shard(group, net, net->units());
    small_loss(net->run(small_batch(8, group.rank()))).backward();
  });
}

// It read as if the module were wrong.
TEST(WeightsStay, NotInAModuleWhoseShardedModelIsGone) {
  for (const Strategy strategy : runtime::kStrategies) {
    run_watched_ranks(2, [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(2, 8, Layers::fused);
      auto model = watched_shard(group, net, net->units(), {.strategy = strategy});
      small_loss(net->run(small_batch(8, group.rank()))).backward();
      group.barrier();
      model.reset();
      group.barrier();
      const std::string message = thrown_text(
          [&] { static_cast<void>(fully_shard(group, net, {{.modules = {net->blocks.front()}}})); });
      expect_in(message, "fully_shard: parameter");
      expect_in(message, "shard a new module");
    });
  }
}

}  // namespace
}  // namespace fsdpp::test::weights_stay_test
