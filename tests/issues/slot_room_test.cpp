// A gradient in whose slot another one lay went to ordinary memory, and where there was no room for it the
// error spoke of more ranks and smaller models: what helps is an order that stays.
#include <atomic>

#include "fsdpp/base/error.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::slot_room_test {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kBlocks = 8;
constexpr int64_t kDim = 8;

// Lanes of the host on which, once it is full, there is room for nothing more.
class FullDevice final : public device::Device {
 public:
  explicit FullDevice(const std::atomic<bool>& full) : full_(full) {}
  [[nodiscard]] bool runs_inline() const noexcept override { return true; }
  [[nodiscard]] device::Memory allocate(std::size_t bytes, std::string purpose,
                                        std::shared_ptr<device::Ledger> ledger) override {
    if (full_) throw NoRoomError("no room for " + purpose);
    return Device::allocate(bytes, std::move(purpose), std::move(ledger));
  }

 private:
  void submit(const device::Operation&, Work work) override {
    if (work) work();
  }

  const std::atomic<bool>& full_;
};

TEST(SlotRoom, WhereItIsShortTheErrorNamesTheOrder) {
  std::atomic<bool> full = false;
  run_watched_ranks(kRanks, [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(kBlocks, kDim, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), {.combine = Combine::sum, .delay_wgrad = true},
                                     std::make_unique<FullDevice>(full));
    SmallNet oracle(kBlocks, kDim, Layers::oracle);
    const auto backward = [&](int step) {
      small_loss(net->run(small_batch(kDim, group.rank(), step))).backward();
    };
    for (int step = 0; step < 4; ++step) {  // slots are planned for this order
      backward(step);
      for (const auto& block : net->blocks) model->backward_dw(*block);
      model->backward_dw();
      oracle_backward(oracle, all_batches(kDim, kRanks, step));
      expect_gradients(*model, oracle);
      model->zero_grad();
      clear(oracle);
    }
    EXPECT_EQ(model->memory().by_purpose().count("gradients beside the plan"), 0U);
    group.barrier();
    full = true;
    backward(4);
    const std::string message = thrown_text<NoRoomError>([&] {
      for (auto block = net->blocks.rbegin(); block != net->blocks.rend(); ++block)
        model->backward_dw(**block);
    });
    expect_in(message, "no room for gradients beside the plan");
    expect_in(message, "gradient of block5, whose slot");
    expect_in(message, "be the same in every step");
  });
}

}  // namespace
}  // namespace fsdpp::test::slot_room_test
