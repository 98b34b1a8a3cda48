#include "apps/pipeline/stage.h"

#include <torch/csrc/autograd/autograd.h>

#include <string>

#include "fsdpp/runtime/call.h"

namespace fsdpp::pipeline {
namespace {

using What = Mailbox::What;

/// Neighbouring chunks of the model that one stage runs as one.
class Part : public torch::nn::Module {
 public:
  Part(int first, int count) {
    for (int i = 0; i < count; ++i) {
      chunks_.push_back(
          register_module(std::to_string(i), std::make_shared<Chunk>(first + i, /*fused=*/true)));
    }
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& input) const {
    at::Tensor x = input;
    for (const auto& chunk : chunks_) x = chunk->forward(x);
    return x;
  }

 private:
  std::vector<std::shared_ptr<Chunk>> chunks_;
};

}  // namespace

Stage::Stage(comm::PeerGroup& data_ranks, Mailbox& mail, Schedule schedule, int stage, int stages)
    : data_ranks_(data_ranks), mail_(mail), schedule_(schedule), stage_(stage), stages_(stages) {
  root_ = std::make_shared<torch::nn::Module>("stage");
  const int count = chunks(schedule);
  const int each = kChunks / (stages * count);
  for (int chunk = 0; chunk < count; ++chunk) {
    const int first = (chunk * stages + stage) * each;
    chunks_.push_back(
        root_->register_module("part" + std::to_string(chunk), std::make_shared<Part>(first, each)));
  }
  const runtime::Options options{.combine = runtime::Combine::sum,
                                 .delay_wgrad = schedule == Schedule::zero_bubble};
  sharded_ = fully_shard(data_ranks, root_, chunks_, options);
  sharded_->reduce_by_hand(true);
}

void Stage::step(int step, int microbatches) {
  const auto window = sharded_->microbatch(/*last=*/true);
  for (const auto& chunk : chunks_) sharded_->gather(*chunk);
  for (const Action& action : actions(schedule_, stage_, stages_, microbatches)) run(action, step);
  for (auto chunk = chunks_.rbegin(); chunk != chunks_.rend(); ++chunk) sharded_->reduce(**chunk);
  sharded_->finish_reduces();
  for (const auto& chunk : chunks_) sharded_->release(*chunk);
  update(sharded_->shards());
  sharded_->weights_changed();
  sharded_->zero_grad();
}

void Stage::run(const Action& action, int step) {
  switch (action.kind) {
    case Action::Kind::forward:
      return forward(action.chunk, action.microbatch, step);
    case Action::Kind::backward:
      return backward(action.chunk, action.microbatch);
    case Action::Kind::weight_gradients:  // of the backwards so far
      return sharded_->backward_dw(*chunks_[static_cast<std::size_t>(action.chunk)]);
  }
}

void Stage::forward(int chunk, int microbatch, int step) {
  const int place = place_of(chunk);
  Pass& pass = passes_[{chunk, microbatch}];
  pass.input = place == 0 ? batch(step, data_ranks_.rank(), microbatch)
                          : mail_.receive(What::activation, place, microbatch).requires_grad_();
  auto& part = static_cast<Part&>(*chunks_[static_cast<std::size_t>(chunk)]);
  pass.output = call(part, pass.input);
  if (place < last_place()) mail_.send(What::activation, place + 1, microbatch, pass.output.detach());
}

void Stage::backward(int chunk, int microbatch) {
  const int place = place_of(chunk);
  const auto found = passes_.find({chunk, microbatch});
  const Pass pass = found->second;
  passes_.erase(found);
  if (place == last_place()) {
    loss(pass.output).backward();
  } else {
    torch::autograd::backward({pass.output}, {mail_.receive(What::gradient, place, microbatch)});
  }
  if (place > 0) mail_.send(What::gradient, place - 1, microbatch, pass.input.grad());
}

std::vector<std::pair<int, std::vector<at::Tensor>>> Stage::weights() {
  const std::vector<at::Tensor> all = sharded_->full_weights();
  const std::size_t each = all.size() / chunks_.size();
  std::vector<std::pair<int, std::vector<at::Tensor>>> result;
  for (std::size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(chunk * each);
    result.push_back({place_of(static_cast<int>(chunk)), {first, first + static_cast<std::ptrdiff_t>(each)}});
  }
  return result;
}

}  // namespace fsdpp::pipeline
