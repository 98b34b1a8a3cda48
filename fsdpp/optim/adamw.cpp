#include "fsdpp/optim/adamw.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>

#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/optim/clip.h"

namespace fsdpp::optim {
namespace {

void check(const AdamWOptions& options) {
  require(options.beta1 >= 0 && options.beta1 < 1, "AdamW: beta1 = ", options.beta1,
          "; expected 0 <= beta1 < 1");
  require(options.beta2 >= 0 && options.beta2 < 1, "AdamW: beta2 = ", options.beta2,
          "; expected 0 <= beta2 < 1");
  require(options.eps >= 0, "AdamW: eps = ", options.eps, "; expected 0 or more");
  require(options.weight_decay >= 0, "AdamW: weight_decay = ", options.weight_decay, "; expected 0 or more");
}

}  // namespace

AdamW::AdamW(runtime::ShardedModel& model, const AdamWOptions& options) : AdamW(model.shards(), options) {
  model_ = &model;
  model.promise_to_tell();
  if (model.device().kernels().optimizer() != nullptr)
    on_device_ = std::make_unique<ShardAdamW>(model, options_);
}

AdamW::~AdamW() = default;

AdamW::AdamW(std::vector<at::Tensor> parameters, const AdamWOptions& options)
    : options_(options), parameters_(std::move(parameters)), states_(parameters_.size()) {
  check(options_);
}

at::Tensor AdamW::step(double learning_rate, std::optional<double> max_norm, double norm_type) {
  require(learning_rate >= 0, "AdamW: learning rate ", learning_rate, "; expected 0 or more");
  require(!max_norm || model_ != nullptr,
          "AdamW: only gradients of a sharded model can be clipped; clip others first");
  if (on_device_) return on_device_->step(learning_rate, max_norm, norm_type);
  at::Tensor norm;
  if (max_norm) norm = at::scalar_tensor(clip_grad_norm(*model_, *max_norm, norm_type), at::kDouble);
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parameters, gradients, first, second, steps;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    if (!parameter.requires_grad() || !parameter.grad().defined()) continue;
    State& state = states_[i];
    const at::Tensor weights = updated(i);
    if (!state.first.defined()) {
      state.first = at::zeros_like(weights);
      state.second = at::zeros_like(weights);
      state.step = at::zeros({}, weights.options().dtype(at::kFloat));
    }
    state.step.add_(1);
    parameters.push_back(weights);
    gradients.push_back(parameter.grad());
    first.push_back(state.first);
    second.push_back(state.second);
    steps.push_back(state.step);
  }
  if (!parameters.empty()) {
    at::_fused_adamw_(parameters, gradients, first, second, /*max_exp_avg_sqs=*/{}, steps, learning_rate,
                      options_.beta1, options_.beta2, options_.weight_decay, options_.eps, /*amsgrad=*/false,
                      /*maximize=*/false);
  }
  round_main_weights();
  if (model_ != nullptr) model_->weights_changed();
  return norm;
}

// What the update writes: the parameter, or the fp32 main weights behind it.
at::Tensor AdamW::updated(std::size_t index) {
  const at::Tensor& parameter = parameters_[index];
  const at::ScalarType gradient = parameter.grad().scalar_type();
  if (gradient == parameter.scalar_type()) return parameter;
  require(gradient == at::kFloat, "AdamW: parameter ", index, " is ", parameter.dtype().name(),
          ", its gradient ", parameter.grad().dtype().name(), "; expected the same, or a gradient in fp32");
  State& state = states_[index];
  if (!state.main.defined() || state.version != parameter._version()) {
    const at::Tensor now = parameter.detach().to(at::kFloat);
    if (state.main.defined()) {
      state.main.copy_(now);
    } else {
      state.main = now;
    }
  }
  return state.main;
}

void AdamW::round_main_weights() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    State& state = states_[i];
    if (!state.main.defined()) continue;
    at::Tensor parameter = parameters_[i];
    parameter.copy_(state.main);
    state.version = parameter._version();
  }
}

int64_t AdamW::state_bytes() const noexcept {
  if (on_device_) return on_device_->state_bytes();
  int64_t bytes = 0;
  for (const State& state : states_) {
    if (state.first.defined()) bytes += static_cast<int64_t>(state.first.nbytes() + state.second.nbytes());
    if (state.main.defined()) bytes += static_cast<int64_t>(state.main.nbytes());
  }
  return bytes;
}

}  // namespace fsdpp::optim
