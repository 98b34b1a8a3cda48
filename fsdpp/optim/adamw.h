#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "fsdpp/optim/device_norm.h"
#include "fsdpp/optim/shard_adamw.h"
#include "fsdpp/runtime/sharded_model.h"

namespace fsdpp::optim {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

/// AdamW (Loshchilov and Hutter 2019): on a sharded model on a GPU by our own kernel, else (and where main
/// weights or gradients are not fp32) through ATen's fused one, on tensors of any sizes, also empty ones. Of
/// a parameter in another dtype with fp32 gradients (runtime::OwnGradients) it keeps fp32 main weights, which
/// it updates and rounds to the parameter's; they are taken anew from a parameter that somebody else has
/// written. A sharded model's main weights are what it has: others than fp32 are widened for the update and
/// rounded.
///
/// State of a parameter (two moments, fp32, and a step count from 0) is made at its first step. Parameters
/// without a gradient are skipped, as torch.optim.AdamW does.
class AdamW {
 public:
  /// Updates `model`'s shards, and tells the model when it did. `model` must outlive it.
  /// Throws UsageError, naming the value, for betas outside [0, 1), or negative eps or weight decay.
  AdamW(runtime::ShardedModel& model, const AdamWOptions& options);
  /// The same of several models on one device, whose gradients are clipped by one norm over all of them.
  AdamW(std::vector<runtime::ShardedModel*> models, const AdamWOptions& options);
  /// Updates any leaf tensors.
  AdamW(std::vector<at::Tensor> parameters, const AdamWOptions& options);

  ~AdamW();

  /// One update with `learning_rate` (>= 0). With `max_norm` (>= 0; of sharded models) gradients are clipped
  /// to it first, as by clip_grad_norm(); returns the norm before, a double scalar where the model lies (else
  /// undefined). By our own kernel nothing of it waits for the device, and the weights' cast and publication
  /// are part of the update. Collective for a sharded model.
  at::Tensor step(double learning_rate, std::optional<double> max_norm = std::nullopt,
                  double norm_type = 2.0);

  [[nodiscard]] int64_t state_bytes() const noexcept;  // of the moments and main weights made so far

 private:
  struct State {
    at::Tensor first;      // mean of gradients, the parameter's sizes
    at::Tensor second;     // mean of squared gradients
    at::Tensor step;       // fp32 scalar, as ATen's kernel wants it
    at::Tensor main;       // fp32 main weights, where the parameter has another dtype than its gradient
    int64_t version = -1;  // of the parameter, when it was rounded from `main`
  };

  struct Lists;

  void check(std::size_t index) const;
  at::Tensor updated(std::size_t index);
  void add(Lists& lists, std::size_t index, const at::Tensor& weight);
  void update(Lists& lists, double learning_rate);
  at::Tensor step_on_device(double learning_rate, std::optional<double> max_norm, double norm_type);

  AdamWOptions options_;
  std::vector<at::Tensor> parameters_;
  std::vector<State> states_;
  std::vector<runtime::ShardedModel*> models_;
  std::vector<std::unique_ptr<ShardAdamW>> on_device_;  // where the models' device has kernels for it
  std::unique_ptr<DeviceNorm> norm_;                    // likewise
};

}  // namespace fsdpp::optim
