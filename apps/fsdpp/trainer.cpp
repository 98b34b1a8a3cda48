#include "apps/fsdpp/trainer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>

#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "fsdpp/optim/clip.h"
#include "fsdpp/optim/schedule.h"
#include "fsdpp/runtime/call.h"

namespace fsdpp::app {
namespace {

nn::LlamaConfig llama_config(const ModelConfig& m) {
  return {.vocabulary = data::ByteTokenizer::kVocabulary,
          .dim = m.dim,
          .layers = m.layers,
          .heads = m.heads,
          .kv_heads = m.kv_heads,
          .ffn = m.ffn,
          .tied = m.tied,
          .rope_theta = m.rope_theta,
          .norm_eps = m.norm_eps};
}

optim::AdamWOptions adamw_options(const TrainConfig& t) {
  optim::AdamWOptions options;
  options.beta1 = t.beta1;
  options.beta2 = t.beta2;
  options.weight_decay = t.weight_decay;
  return options;
}

}  // namespace

Trainer::Trainer(const Config& config, comm::PeerGroup& group, const data::Split& split)
    : config_(config),
      group_(group),
      train_(split.train, config.model.sequence, config.train.batch,
             static_cast<uint64_t>(config.train.seed)),
      validation_(data::Sampler::validation(split.validation, config.model.sequence, config.train.batch)),
      model_(
          std::make_shared<nn::Llama>(llama_config(config.model), static_cast<uint64_t>(config.train.seed))),
      sharded_(fully_shard(group, model_, model_->units(),
                           runtime::Options{.strategy = runtime::strategy_from(config.sharding.strategy),
                                            .fused = config.sharding.fused})),
      optimizer_(std::make_unique<optim::AdamW>(*sharded_, adamw_options(config.train))) {}

StepResult Trainer::step(int64_t step) {
  const TrainConfig& t = config_.train;
  StepResult result;
  for (int64_t m = 0; m < t.microbatches; ++m) {
    if (interrupted()) throw Interrupted(text("stopped in step ", step + 1));
    const data::Batch batch = train_.batch(step, group_.rank(), group_.ranks(), m, t.microbatches);
    const auto scope = sharded_->microbatch(/*last=*/m + 1 == t.microbatches);
    const at::Tensor loss = call(*model_, batch.inputs, batch.targets) / static_cast<double>(t.microbatches);
    loss.backward();
    result.loss += loss.item<double>();
  }
  result.learning_rate = optim::warmup_cosine(step, t.warmup_steps, t.steps, t.learning_rate, t.min_lr_ratio);
  result.gradient_norm = optim::clip_grad_norm(*sharded_, t.clip_norm);
  optimizer_->step(result.learning_rate);
  sharded_->zero_grad();
  return result;
}

double Trainer::validate() {
  const at::NoGradGuard no_gradients;
  const int64_t microbatches = config_.train.microbatches;
  const int64_t batches = std::min(config_.train.eval_batches, validation_.full_batches());
  double loss = 0;
  for (int64_t b = 0; b < batches; ++b) {
    for (int64_t m = 0; m < microbatches; ++m) {
      if (interrupted()) throw Interrupted("stopped in the validation");
      const data::Batch batch = validation_.batch(b, group_.rank(), group_.ranks(), m, microbatches);
      loss += call(*model_, batch.inputs, batch.targets).item<double>();
    }
  }
  return mean(loss / static_cast<double>(batches * microbatches));
}

double Trainer::mean(double value) {
  return group_.sum(std::array{value}).front() / static_cast<double>(group_.ranks());
}

}  // namespace fsdpp::app
