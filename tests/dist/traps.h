#pragma once

#include <memory>
#include <utility>

#include "tests/support/gate_device.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

// What the traps' tests share.
namespace fsdpp::test::traps {

inline constexpr int64_t kDim = 8;

/// A small model, sharded, and the device that the test can hold up.
struct Sharded {
  std::shared_ptr<SmallNet> net;
  GateDevice* lanes;
  std::shared_ptr<ShardedModel> model;
};

inline Sharded shard(comm::PeerGroup& group, int64_t blocks, Options options, Layers layers = Layers::fused) {
  auto lanes = std::make_unique<GateDevice>();
  Sharded made{std::make_shared<SmallNet>(blocks, kDim, layers), lanes.get(), nullptr};
  made.model = watched_shard(group, made.net, made.net->units(), options, std::move(lanes));
  return made;
}

inline void backward(const Sharded& sharded, int rank, int index = 0) {
  small_loss(sharded.net->run(small_batch(kDim, rank, index))).backward();
}

}  // namespace fsdpp::test::traps
