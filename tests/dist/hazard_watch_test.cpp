// The watch that every test of ranks runs under: it sees what models do, and a hazard fails the test.
#include <gtest/gtest-spi.h>

#include "fsdpp/trace/recorder.h"
#include "tests/support/gate_device.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test {
namespace {

using device::LaneKind;

constexpr int64_t kDim = 8;

// A step on two ranks; `fault` may give a rank's lanes something else to do behind it.
void train(const std::function<void(ShardedModel&, int rank)>& fault) {
  run_watched_ranks(2, [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), sharded_sum());
    small_loss(net->run(small_batch(kDim, group.rank()))).backward();
    if (fault) fault(*model, group.rank());
  });
}

TEST(HazardWatch, SeesEveryOperationFromTheFirst) {
  const uint64_t before = hazards_checked();
  trace::Recorder recorder;
  run_watched_ranks(1, [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    auto lanes = std::make_unique<GateDevice>();
    lanes->observe(&recorder);
    const auto model =
        watched_shard(group, net, net->units(), {.strategy = Strategy::no_shard}, std::move(lanes));
    EXPECT_GT(recorder.operations().size(), 0U) << "first weights";
    small_loss(net->run(small_batch(kDim, 0))).backward();
  });
  EXPECT_EQ(hazards_checked() - before, recorder.operations().size());
}

// On the host everything runs in turn, so the values are right: only the checker knows better.
TEST(HazardWatch, AHazardFailsTheTest) {
  train({});
  EXPECT_NONFATAL_FAILURE(train([](ShardedModel& model, int rank) {
                            if (rank != 1) return;
                            const at::Tensor gradient = model.shards().front().grad();
                            model.device().announce(LaneKind::gather, "clip",
                                                    {{}, {{gradient.const_data_ptr(), gradient.nbytes()}}});
                          }),
                          "run clip of rank 1 must wait for reduce");
}

TEST(HazardWatch, APeerThatIsNotWaitedForFailsTheTest) {
  EXPECT_NONFATAL_FAILURE(train([](ShardedModel& model, int rank) {
                            model.device().wait_signal(LaneKind::reduce, "ready of nobody", 1 - rank, 99, 1,
                                                       nullptr);
                          }),
                          "ready of nobody (rank 0, channel 99, sequence 1) of rank 1 waits for a signal");
}

TEST(HazardWatch, ModelsAreToldApart) {
  run_watched_ranks(2, [&](comm::PeerGroup& group) {
    const auto one = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto other = std::make_shared<SmallNet>(1, kDim, Layers::fused);
    const auto first = watched_shard(group, one, one->units(), sharded_sum());
    const auto second = watched_shard(group, other, other->units(), sharded_sum());
    small_loss(other->run(one->run(small_batch(kDim, group.rank())))).backward();
  });
}

TEST(HazardWatch, WhatARankThrowsGoesOn) {
  EXPECT_THROW(train([](ShardedModel&, int rank) {
                 if (rank == 1) throw std::out_of_range("a rank's own");
               }),
               std::out_of_range);
}

TEST(HazardWatch, AModelOfAnUnwatchedThreadIsRefused) {
  comm::run_thread_ranks(1, [](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(1, kDim, Layers::fused);
    EXPECT_THROW((void)watched_shard(group, net, net->units(), sharded_sum()), std::logic_error);
  });
}

}  // namespace
}  // namespace fsdpp::test
