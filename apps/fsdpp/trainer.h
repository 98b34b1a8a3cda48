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

/// What one optimizer step gave.
struct StepResult {
  double loss = 0;           // mean over this rank's microbatches, nats per token
  double gradient_norm = 0;  // global, before clipping
  double learning_rate = 0;
};

/// Model, optimizer and data of one rank, and the steps over them. Every call is collective.
class Trainer {
 public:
  /// `group` and the tokens of `split` must outlive it.
  Trainer(const Config& config, comm::PeerGroup& group, const data::Split& split);

  /// Step `step` (0, 1, ...): forward and backward of each microbatch, clipping, AdamW.
  /// Throws Interrupted between microbatches, and PeerError.
  StepResult step(int64_t step);

  /// Mean loss over at most train.eval_batches batches of the validation text, nats per byte; equal on all
  /// ranks.
  [[nodiscard]] double validate();

  /// `value` averaged over the ranks.
  [[nodiscard]] double mean(double value);

  [[nodiscard]] nn::Llama& model() noexcept { return *model_; }
  [[nodiscard]] runtime::ShardedModel& sharded() noexcept { return *sharded_; }
  [[nodiscard]] int64_t tokens_per_step() const noexcept {
    return config_.train.batch * config_.model.sequence;
  }

 private:
  const Config& config_;
  comm::PeerGroup& group_;
  data::Sampler train_;
  data::Sampler validation_;
  std::shared_ptr<nn::Llama> model_;
  std::shared_ptr<runtime::ShardedModel> sharded_;
  std::unique_ptr<optim::AdamW> optimizer_;
};

}  // namespace fsdpp::app
