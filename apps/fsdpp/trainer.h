#pragma once

#include <cstdint>
#include <memory>

#include "apps/fsdpp/config.h"
#include "fsdpp/comm/peer_group.h"
#include "fsdpp/data/corpus.h"
#include "fsdpp/data/sampler.h"
#include "fsdpp/nn/llama.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/runtime/fully_shard.h"

namespace fsdpp::app {

/// What one optimizer step gave. Tensors are double scalars where the model lies: to read one waits for the
/// device.
struct StepResult {
  at::Tensor loss;           // mean over this rank's microbatches, nats per token
  at::Tensor gradient_norm;  // global, before clipping
  double learning_rate = 0;
};

/// Model, optimizer and data of one rank, and the steps over them. Every call is collective.
class Trainer {
 public:
  /// `lanes`: of the GPU to compute on; null: the CPU. `group` and the tokens of `split` must outlive it.
  Trainer(const Config& config, comm::PeerGroup& group, const data::Split& split,
          std::unique_ptr<device::Device> lanes);

  /// Step `step` (0, 1, ...): forward and backward of each microbatch, clipping, AdamW.
  /// Throws Interrupted between microbatches, and PeerError.
  StepResult step(int64_t step);

  /// Mean loss over at most train.eval_batches batches of the validation text, nats per byte; equal on all
  /// ranks.
  [[nodiscard]] double validate();

  /// `value` averaged over the ranks.
  [[nodiscard]] double mean(double value);

  [[nodiscard]] nn::Llama& model() noexcept { return *model_; }
  [[nodiscard]] at::Device place() const noexcept { return place_; }
  [[nodiscard]] runtime::ShardedModel& sharded() noexcept { return *sharded_; }
  [[nodiscard]] int64_t tokens_per_step() const noexcept {
    return config_.train.batch * config_.model.sequence;
  }

 private:
  /// Mean loss of a batch, a scalar on the device.
  [[nodiscard]] at::Tensor loss(const data::Batch& batch);
  [[nodiscard]] at::Tensor zero() const;

  const Config& config_;
  comm::PeerGroup& group_;
  data::Sampler train_;
  data::Sampler validation_;
  at::Device place_;  // where the model lies
  std::shared_ptr<nn::Llama> model_;
  std::unique_ptr<comm::MeshGroup> mesh_;  // null: all ranks shard together
  std::shared_ptr<runtime::ShardedModel> sharded_;
  std::unique_ptr<optim::AdamW> optimizer_;
};

}  // namespace fsdpp::app
