#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fsdpp/nn/embedding.h"
#include "fsdpp/nn/expert_feed_forward.h"
#include "fsdpp/nn/linear.h"
#include "fsdpp/nn/recompute.h"
#include "fsdpp/nn/rms_norm.h"
#include "fsdpp/nn/rotary.h"
#include "fsdpp/runtime/sharded_model.h"

namespace fsdpp::nn {

struct LlamaConfig {
  int64_t vocabulary = 257;
  int64_t dim = 256;  // width of the residual stream
  int64_t layers = 4;
  int64_t heads = 8;                      // query heads, dividing dim into even head sizes
  int64_t kv_heads = 4;                   // key and value heads, dividing heads
  int64_t ffn = 704;                      // width of the feed-forward part
  bool tied = false;                      // the head is the embedding table
  Recompute recompute = Recompute::none;  // of each block's activations
  int64_t experts = 0;         // above 0: so many feed-forward parts of width ffn per block, of which
  int64_t active_experts = 2;  // each token goes through so many
  int64_t adapter_rank =
      0;  // above 0: all is frozen but an adapter of this rank on each linear layer of a block
  double rope_theta = 10000;
  double norm_eps = 1e-5;
  at::ScalarType dtype = at::kFloat;  // of the parameters
};

/// Causal self-attention with grouped queries (Ainslie et al. 2023): [b, t, dim] -> [b, t, dim].
class Attention : public torch::nn::Module {
 public:
  Attention(const LlamaConfig& config, at::Generator& generator);
  [[nodiscard]] at::Tensor forward(const at::Tensor& input, const Rotary& rotary) const;

 private:
  int64_t heads_, kv_heads_, head_size_;
  std::shared_ptr<Linear> query_, key_, value_, output_;
};

/// SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)), [..., dim] -> [..., dim].
class FeedForward : public torch::nn::Module {
 public:
  FeedForward(const LlamaConfig& config, at::Generator& generator);
  [[nodiscard]] at::Tensor forward(const at::Tensor& input) const;

 private:
  std::shared_ptr<Linear> gate_, up_, down_;
};

/// One layer: x + attention(norm(x)), then x + feed_forward(norm(x)).
class LlamaBlock : public torch::nn::Module {
 public:
  LlamaBlock(const LlamaConfig& config, at::Generator& generator);
  [[nodiscard]] at::Tensor forward(const at::Tensor& input, const Rotary& rotary) const;

  /// The two halves, each with its norm, as units of their own.
  [[nodiscard]] std::vector<runtime::UnitSpec> halves() const;

 private:
  std::shared_ptr<RMSNorm> attention_norm_, ffn_norm_;
  std::shared_ptr<Attention> attention_;
  std::shared_ptr<FeedForward> feed_forward_;  // or (config.experts)
  std::shared_ptr<ExpertFeedForward> experts_;
};

/// A decoder-only language model of the Llama family (Touvron et al. 2023). Computes in the dtype of its
/// weights, the loss in fp32.
class Llama : public torch::nn::Module {
 public:
  /// The same weights on every rank for the same `seed`, drawn on the CPU. Throws UsageError, naming the
  /// value, unless heads divide dim into even sizes and kv_heads divide heads.
  Llama(const LlamaConfig& config, uint64_t seed);
  /// Weights drawn from `generator`, on its device. Throws as above.
  Llama(const LlamaConfig& config, at::Generator generator);

  /// tokens [b, t] int64. With targets [b, t] int64: the mean cross-entropy in nats, a scalar. Without
  /// (undefined): logits [b, t, vocabulary].
  [[nodiscard]] at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets);

  /// The units to shard by: the embedding, the blocks (the first one in halves: what a step has to wait for
  /// before its first block and behind its last reduce is then less), the head with its norm. A tied model's
  /// norm is left to the root.
  [[nodiscard]] std::vector<runtime::UnitSpec> units() const;
  [[nodiscard]] const LlamaConfig& config() const noexcept { return config_; }

 private:
  [[nodiscard]] at::Tensor logits(const at::Tensor& x) const;

  LlamaConfig config_;
  std::shared_ptr<Embedding> embedding_;
  std::vector<std::shared_ptr<LlamaBlock>> blocks_;
  std::shared_ptr<RMSNorm> norm_;
  std::shared_ptr<Linear> head_;  // null when tied
  Rotary rotary_;                 // of the longest sequence so far
};

}  // namespace fsdpp::nn
