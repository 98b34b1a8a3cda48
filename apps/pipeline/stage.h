#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "apps/pipeline/mailbox.h"
#include "apps/pipeline/model.h"
#include "apps/pipeline/schedule.h"
#include "fsdpp/comm/peer_group.h"
#include "fsdpp/runtime/fully_shard.h"

namespace fsdpp::pipeline {

/// One stage of a pipeline on one data rank: its chunks of the model, sharded over the stage's data ranks.
///
/// A window runs by hand: weights are gathered once for all microbatches, gradients add up in the slots, and
/// each chunk is reduced once at the end.
class Stage {
 public:
  /// Collective over `data_ranks`. `mail`: of this rank's pipeline.
  Stage(comm::PeerGroup& data_ranks, Mailbox& mail, Schedule schedule, int stage, int stages);

  /// One optimizer step over `microbatches`.
  void step(int step, int microbatches);

  /// Collective: the stage's weights, chunk by chunk, with each chunk's place in the model.
  [[nodiscard]] std::vector<std::pair<int, std::vector<at::Tensor>>> weights();

 private:
  struct Pass {
    at::Tensor input;
    at::Tensor output;
  };

  void run(const Action& action, int step);
  void forward(int chunk, int microbatch, int step);
  void backward(int chunk, int microbatch);
  /// Of the whole model: chunks go round the stages.
  [[nodiscard]] int place_of(int chunk) const noexcept { return chunk * stages_ + stage_; }
  [[nodiscard]] int last_place() const noexcept { return static_cast<int>(chunks_.size()) * stages_ - 1; }

  comm::PeerGroup& data_ranks_;
  Mailbox& mail_;
  Schedule schedule_;
  int stage_;
  int stages_;
  std::vector<std::shared_ptr<torch::nn::Module>> chunks_;  // each of one or several of the model's
  std::shared_ptr<torch::nn::Module> root_;
  std::shared_ptr<runtime::ShardedModel> sharded_;
  std::map<std::pair<int, int>, Pass> passes_;  // by chunk and microbatch: forwards that wait for a backward
};

}  // namespace fsdpp::pipeline
