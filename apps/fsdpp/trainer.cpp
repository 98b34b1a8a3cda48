#include "apps/fsdpp/trainer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/max.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>

#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
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
          .recompute = nn::recompute_from(m.recompute),
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

at::Device place_of(const device::Device* lanes) {
  if (lanes == nullptr || lanes->gpu() < 0) return at::kCPU;
  return {at::kCUDA, static_cast<c10::DeviceIndex>(lanes->gpu())};
}

runtime::Options options_of(const ShardingConfig& s, at::Device place) {
  runtime::Options options{.strategy = runtime::strategy_from(s.strategy),
                           .main_weights = s.main_weights == "fp32" ? runtime::MainWeights::fp32
                                                                    : runtime::MainWeights::model_dtype,
                           .accumulation_dtype = s.accumulation_dtype == "bf16" ? at::kBFloat16 : at::kFloat,
                           .wire_dtype = s.wire_dtype == "bf16" ? at::kBFloat16 : at::kFloat,
                           .reshard_after_forward = reshard_of(s),
                           .keep_gathered_bytes = s.keep_gathered_mib < 0 ? -1 : s.keep_gathered_mib << 20,
                           .shard_optimizer_over_replicas = s.optimizer_over_replicas,
                           .offload = s.offload,
                           .delay_wgrad = s.delay_wgrad,
                           .fused = s.fused};
  // The model is made in fp32: what main weights are kept in, and with what it computes, is rounded from
  // that.
  if (s.model_dtype == "bf16" || (s.model_dtype == "auto" && place.is_cuda()))
    options.model_dtype = at::kBFloat16;
  return options;
}

/// Null: all ranks shard together.
std::unique_ptr<comm::MeshGroup> mesh_of(const ShardingConfig& s, comm::PeerGroup& group) {
  const int replicas = replicas_of(s, group.ranks());
  if (replicas == 1) return nullptr;
  return std::make_unique<comm::MeshGroup>(group, comm::hybrid_mesh(group.ranks(), replicas));
}

std::shared_ptr<runtime::ShardedModel> shard(comm::PeerGroup& group, comm::MeshGroup* mesh,
                                             const std::shared_ptr<nn::Llama>& model,
                                             const runtime::Options& options,
                                             std::unique_ptr<device::Device> lanes) {
  if (mesh != nullptr) return fully_shard(*mesh, model, model->units(), options, std::move(lanes));
  return fully_shard(group, model, model->units(), options, std::move(lanes));
}

/// `tokens` where the model lies. On the way to a GPU they are copied to pinned memory, from where they go
/// without the host waiting; libtorch keeps that memory until the copy is over.
at::Tensor moved(const at::Tensor& tokens, at::Device place) {
  return place.is_cpu() ? tokens : tokens.pin_memory().to(place, /*non_blocking=*/true);
}

}  // namespace

Trainer::Trainer(const Config& config, comm::PeerGroup& group, const data::Split& split,
                 std::unique_ptr<device::Device> lanes)
    : config_(config),
      group_(group),
      train_(split.train, config.model.sequence, config.train.batch,
             static_cast<uint64_t>(config.train.seed)),
      validation_(data::Sampler::validation(split.validation, config.model.sequence, config.train.batch)),
      place_(place_of(lanes.get())),
      model_(
          std::make_shared<nn::Llama>(llama_config(config.model), static_cast<uint64_t>(config.train.seed))),
      mesh_(mesh_of(config.sharding, group)),
      sharded_(shard(group, mesh_.get(), model_, options_of(config.sharding, place_), std::move(lanes))),
      optimizer_(std::make_unique<optim::AdamW>(*sharded_, adamw_options(config.train))) {}

StepResult Trainer::step(int64_t step) {
  const TrainConfig& t = config_.train;
  StepResult result{.loss = zero()};
  for (int64_t m = 0; m < t.microbatches; ++m) {
    if (interrupted()) throw Interrupted(text("stopped in step ", step + 1));
    const data::Batch batch = train_.batch(step, group_.rank(), group_.ranks(), m, t.microbatches);
    const auto scope = sharded_->microbatch(/*last=*/m + 1 == t.microbatches);
    const at::Tensor part = loss(batch) / static_cast<double>(t.microbatches);
    part.backward();
    sharded_->backward_dw();  // what sharding.delay_wgrad left
    result.loss += part.detach();
  }
  result.learning_rate = optim::warmup_cosine(step, t.warmup_steps, t.steps, t.learning_rate, t.min_lr_ratio);
  result.gradient_norm = optimizer_->step(result.learning_rate, t.clip_norm);
  sharded_->zero_grad();
  return result;
}

double Trainer::validate() {
  const at::NoGradGuard no_gradients;
  const int64_t microbatches = config_.train.microbatches;
  const int64_t batches = std::min(config_.train.eval_batches, validation_.full_batches());
  at::Tensor sum = zero();
  for (int64_t b = 0; b < batches; ++b) {
    for (int64_t m = 0; m < microbatches; ++m) {
      if (interrupted()) throw Interrupted("stopped in the validation");
      const data::Batch batch = validation_.batch(b, group_.rank(), group_.ranks(), m, microbatches);
      sum += loss(batch);
    }
  }
  return mean(sum.item<double>() / static_cast<double>(batches * microbatches));
}

at::Tensor Trainer::loss(const data::Batch& batch) {
  const int64_t most = batch.inputs.max().item<int64_t>();
  if (most >= model_->config().vocabulary) {
    throw EnvironmentError(text("token ", most, " is none of the ", model_->config().vocabulary,
                                " there are: the tokens kept of data.text = \"", config_.data.text,
                                "\" are damaged; remove data.cache = \"", config_.data.cache,
                                "\", which is then made again"));
  }
  return call(*model_, moved(batch.inputs, place_), moved(batch.targets, place_));
}

at::Tensor Trainer::zero() const { return at::zeros({}, at::TensorOptions(place_).dtype(at::kDouble)); }

double Trainer::mean(double value) {
  return group_.sum(std::array{value}).front() / static_cast<double>(group_.ranks());
}

}  // namespace fsdpp::app
