#include "fsdpp/nn/llama.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <c10/core/InferenceMode.h>

#include <cmath>
#include <string>

#include "fsdpp/base/error.h"
#include "fsdpp/nn/cross_entropy.h"
#include "fsdpp/runtime/call.h"

namespace fsdpp::nn {
namespace {

constexpr double kDeviation = 0.02;  // of GPT-2 (Radford et al. 2019)

// Outputs onto the residual stream start smaller, by the number of additions to it.
double residual_deviation(const LlamaConfig& config) {
  return kDeviation / std::sqrt(2.0 * static_cast<double>(config.layers));
}

const LlamaConfig& checked(const LlamaConfig& config) {
  require(config.heads > 0 && config.dim % config.heads == 0 && (config.dim / config.heads) % 2 == 0,
          "Llama: heads = ", config.heads, " must divide dim = ", config.dim, " into even head sizes");
  require(config.kv_heads > 0 && config.heads % config.kv_heads == 0, "Llama: kv_heads = ", config.kv_heads,
          " must divide heads = ", config.heads);
  require(config.adapter_rank == 0 || config.experts == 0, "Llama: adapter_rank = ", config.adapter_rank,
          " with experts = ", config.experts, ": experts have no adapters; set one of them to 0");
  return config;
}

at::TensorOptions options_of(const LlamaConfig& config, const at::Generator& generator) {
  return at::TensorOptions(generator.device()).dtype(config.dtype);
}

}  // namespace

Attention::Attention(const LlamaConfig& config, at::Generator& generator)
    : heads_(config.heads), kv_heads_(config.kv_heads), head_size_(config.dim / config.heads) {
  const auto make = [&](const char* name, int64_t in, int64_t out, double deviation) {
    return register_module(
        name, std::make_shared<Linear>(LinearOptions{in, out, false, config.dtype, config.adapter_rank},
                                       deviation, generator));
  };
  query_ = make("query", config.dim, config.dim, kDeviation);
  key_ = make("key", config.dim, kv_heads_ * head_size_, kDeviation);
  value_ = make("value", config.dim, kv_heads_ * head_size_, kDeviation);
  output_ = make("output", config.dim, config.dim, residual_deviation(config));
}

at::Tensor Attention::forward(const at::Tensor& input, const Rotary& rotary) const {
  const int64_t batch = input.size(0);
  const int64_t length = input.size(1);
  const auto split = [&](const at::Tensor& x, int64_t heads) {
    return x.view({batch, length, heads, head_size_}).transpose(1, 2);
  };
  const at::Tensor query = rotate(split(query_->forward(input), heads_), rotary);
  const at::Tensor key = rotate(split(key_->forward(input), kv_heads_), rotary);
  const at::Tensor value = split(value_->forward(input), kv_heads_);
  const at::Tensor mixed = at::scaled_dot_product_attention(query, key, value, /*attn_mask=*/{},
                                                            /*dropout_p=*/0.0, /*is_causal=*/true,
                                                            /*scale=*/{}, /*enable_gqa=*/kv_heads_ != heads_);
  return output_->forward(mixed.transpose(1, 2).reshape({batch, length, heads_ * head_size_}));
}

FeedForward::FeedForward(const LlamaConfig& config, at::Generator& generator) {
  const auto make = [&](const char* name, int64_t in, int64_t out, double deviation) {
    return register_module(
        name, std::make_shared<Linear>(LinearOptions{in, out, false, config.dtype, config.adapter_rank},
                                       deviation, generator));
  };
  gate_ = make("gate", config.dim, config.ffn, kDeviation);
  up_ = make("up", config.dim, config.ffn, kDeviation);
  down_ = make("down", config.ffn, config.dim, residual_deviation(config));
}

at::Tensor FeedForward::forward(const at::Tensor& input) const {
  return down_->forward(at::silu(gate_->forward(input)) * up_->forward(input));
}

LlamaBlock::LlamaBlock(const LlamaConfig& config, at::Generator& generator) {
  attention_norm_ =
      register_module("attention_norm",
                      std::make_shared<RMSNorm>(config.dim, config.norm_eps, options_of(config, generator)));
  attention_ = register_module("attention", std::make_shared<Attention>(config, generator));
  ffn_norm_ = register_module(
      "ffn_norm", std::make_shared<RMSNorm>(config.dim, config.norm_eps, options_of(config, generator)));
  if (config.experts == 0) {
    feed_forward_ = register_module("feed_forward", std::make_shared<FeedForward>(config, generator));
    return;
  }
  const ExpertFeedForwardOptions experts{config.dim, config.ffn, config.experts, config.active_experts,
                                         config.dtype};
  experts_ = register_module("feed_forward", std::make_shared<ExpertFeedForward>(
                                                 experts, kDeviation, residual_deviation(config), generator));
}

at::Tensor LlamaBlock::forward(const at::Tensor& input, const Rotary& rotary) const {
  const at::Tensor middle = input + call_as(*attention_, [&] {
                              return attention_->forward(attention_norm_->forward(input), rotary);
                            });
  const auto wide = [&](const auto& part) {
    return call_as(*part, [&] { return part->forward(ffn_norm_->forward(middle)); });
  };
  return middle + (experts_ ? wide(experts_) : wide(feed_forward_));
}

std::vector<runtime::UnitSpec> LlamaBlock::halves() const {
  const std::shared_ptr<torch::nn::Module> second =
      experts_ ? std::shared_ptr<torch::nn::Module>(experts_) : feed_forward_;
  return {{{attention_, attention_norm_}}, {{second, ffn_norm_}}};
}

Llama::Llama(const LlamaConfig& config, uint64_t seed)
    : Llama(config, at::make_generator<at::CPUGeneratorImpl>(seed)) {}

Llama::Llama(const LlamaConfig& config, at::Generator generator) : config_(checked(config)) {
  embedding_ = register_module(
      "embedding",
      std::make_shared<Embedding>(config_.vocabulary, config_.dim, kDeviation, generator, config_.dtype));
  const auto layers = register_module("layers", std::make_shared<torch::nn::Module>("layers"));
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    blocks_.push_back(
        layers->register_module(std::to_string(layer), std::make_shared<LlamaBlock>(config_, generator)));
  }
  norm_ = register_module(
      "norm", std::make_shared<RMSNorm>(config_.dim, config_.norm_eps, options_of(config_, generator)));
  if (!config_.tied) {
    const LinearOptions options{config_.dim, config_.vocabulary, false, config_.dtype};
    head_ = register_module("head", std::make_shared<Linear>(options, kDeviation, generator));
  }
  if (config_.adapter_rank == 0) return;
  for (const auto& item : named_parameters()) {
    const bool adapter = item.key().find("adapter_") != std::string::npos;
    item.value().requires_grad_(adapter);
  }
}

at::Tensor Llama::logits(const at::Tensor& x) const {
  if (!head_)
    return call_as(*embedding_, [&] { return fused_linear(norm_->forward(x), embedding_->weight); });
  return call_as(*head_, [&] { return head_->forward(norm_->forward(x)); });  // one unit
}

at::Tensor Llama::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  const int64_t length = tokens.size(1);
  at::Tensor x = embedding_->look_up(tokens);
  if (!rotary_.cos.defined() || rotary_.cos.size(0) < length ||
      rotary_.cos.options().type_equal(x.options()) == 0) {
    const c10::InferenceMode normal(false);  // kept: must serve later passes of any kind
    rotary_ = rotary(length, config_.dim / config_.heads, config_.rope_theta, x.options());
  }
  const Rotary angles = {rotary_.cos.narrow(0, 0, length), rotary_.sin.narrow(0, 0, length)};
  for (const auto& block : blocks_) {
    const auto once = [block, angles](const at::Tensor& input) { return call(*block, input, angles); };
    x = recompute(config_.recompute, once, x);
  }
  const at::Tensor scores = logits(x);
  if (!targets.defined()) return scores;
  return cross_entropy(scores.view({-1, config_.vocabulary}), targets.reshape({-1}));
}

std::vector<runtime::UnitSpec> Llama::units() const {
  std::vector<runtime::UnitSpec> units;
  units.push_back({{embedding_}, head_ ? runtime::Use::rows : runtime::Use::rows_and_whole});
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    if (i > 0) {
      units.push_back({{blocks_[i]}});
      continue;
    }
    for (const runtime::UnitSpec& half : blocks_[0]->halves()) units.push_back(half);
  }
  if (head_) units.push_back({{head_, norm_}});
  return units;
}

}  // namespace fsdpp::nn
