#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fsdpp/runtime/sharded_model.h"

namespace fsdpp::optim {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

/// AdamW (Loshchilov and Hutter 2019) through ATen's fused kernel, on fp32 tensors of any sizes, also empty
/// ones.
///
/// State of a parameter (two moments, fp32, and a step count from 0) is made at its first step. Parameters
/// without a gradient are skipped, as torch.optim.AdamW does.
class AdamW {
 public:
  /// Updates `model`'s shards, and tells the model when it did. `model` must outlive it.
  /// Throws UsageError, naming the value, for betas outside [0, 1), or negative eps or weight decay.
  AdamW(runtime::ShardedModel& model, const AdamWOptions& options);
  /// Updates any leaf tensors.
  AdamW(std::vector<at::Tensor> parameters, const AdamWOptions& options);

  /// One update with `learning_rate` (>= 0).
  void step(double learning_rate);

  [[nodiscard]] int64_t state_bytes() const noexcept;  // of both moments made so far

 private:
  struct State {
    at::Tensor first;   // mean of gradients, the parameter's sizes
    at::Tensor second;  // mean of squared gradients
    at::Tensor step;    // fp32 scalar, as ATen's kernel wants it
  };

  AdamWOptions options_;
  std::vector<at::Tensor> parameters_;
  std::vector<State> states_;
  runtime::ShardedModel* model_ = nullptr;
};

}  // namespace fsdpp::optim
