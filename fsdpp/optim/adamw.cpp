#include "fsdpp/optim/adamw.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>

#include <map>
#include <tuple>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/optim/clip.h"

namespace fsdpp::optim {
namespace {

constexpr std::size_t kCopiedAtOnce = std::size_t{64} << 20;  // bytes of weights and gradients in fp32

void check_options(const AdamWOptions& options) {
  require(options.beta1 >= 0 && options.beta1 < 1, "AdamW: beta1 = ", options.beta1,
          "; expected 0 <= beta1 < 1");
  require(options.beta2 >= 0 && options.beta2 < 1, "AdamW: beta2 = ", options.beta2,
          "; expected 0 <= beta2 < 1");
  require(options.eps >= 0, "AdamW: eps = ", options.eps, "; expected 0 or more");
  require(options.weight_decay >= 0, "AdamW: weight_decay = ", options.weight_decay, "; expected 0 or more");
}

std::vector<at::Tensor> all_shards(const std::vector<runtime::ShardedModel*>& models) {
  require(!models.empty(), "AdamW: no models given; expected at least one");
  std::vector<at::Tensor> all;
  for (const runtime::ShardedModel* model : models) {
    const std::vector<at::Tensor> shards = model->shards();
    all.insert(all.end(), shards.begin(), shards.end());
  }
  return all;
}

}  // namespace

// Of one dtype and device, as ATen's kernel wants them.
struct AdamW::Lists {
  std::vector<std::size_t> indices;
  std::vector<at::Tensor> weights, gradients, first, second, steps;
  std::size_t copied = 0;  // bytes that are there for the update alone
};

AdamW::AdamW(runtime::ShardedModel& model, const AdamWOptions& options)
    : AdamW(std::vector<runtime::ShardedModel*>{&model}, options) {}

AdamW::AdamW(std::vector<runtime::ShardedModel*> models, const AdamWOptions& options)
    : AdamW(all_shards(models), options) {
  models_ = std::move(models);
  bool kernels = true;
  for (runtime::ShardedModel* model : models_) {
    model->promise_to_tell();
    kernels = kernels && model->device().kernels().optimizer() != nullptr && !model->options().offload &&
              model->all_fp32();
  }
  if (!kernels) return;
  for (runtime::ShardedModel* model : models_)
    on_device_.push_back(std::make_unique<ShardAdamW>(*model, options_));
  norm_ = std::make_unique<DeviceNorm>(models_);
}

AdamW::~AdamW() = default;

AdamW::AdamW(std::vector<at::Tensor> parameters, const AdamWOptions& options)
    : options_(options), parameters_(std::move(parameters)), states_(parameters_.size()) {
  check_options(options_);
}

at::Tensor AdamW::step(double learning_rate, std::optional<double> max_norm, double norm_type) {
  require(learning_rate >= 0, "AdamW: learning rate ", learning_rate, "; expected 0 or more");
  require(!max_norm || !models_.empty(),
          "AdamW: only gradients of a sharded model can be clipped; clip others first");
  for (const runtime::ShardedModel* model : models_) model->require_complete_gradients("AdamW");
  if (!on_device_.empty()) return step_on_device(learning_rate, max_norm, norm_type);
  at::Tensor norm;
  if (max_norm) norm = at::scalar_tensor(clip_grad_norm(models_, *max_norm, norm_type), at::kDouble);
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  std::vector<std::size_t> chosen;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].requires_grad() || !parameters_[i].grad().defined()) continue;
    check(i);  // all of them before anything is changed: one may be refused
    chosen.push_back(i);
  }
  std::map<std::tuple<at::ScalarType, c10::DeviceType, c10::DeviceIndex>, Lists> kinds;
  for (const std::size_t index : chosen) {
    const at::Tensor weight = updated(index);
    Lists& lists = kinds[{weight.scalar_type(), weight.device().type(), weight.device().index()}];
    add(lists, index, weight);
    if (lists.copied >= kCopiedAtOnce) update(lists, learning_rate);
  }
  for (auto& [kind, lists] : kinds) update(lists, learning_rate);
  for (runtime::ShardedModel* model : models_) model->weights_changed();
  return norm;
}

void AdamW::add(Lists& lists, std::size_t index, const at::Tensor& weight) {
  State& state = states_[index];
  if (!state.first.defined()) {
    state.first = at::zeros_like(weight);
    state.second = at::zeros_like(weight);
    state.step = at::zeros({}, weight.options().dtype(at::kFloat));
  }
  state.first = state.first.to(weight.scalar_type());  // gradients may have got another dtype
  state.second = state.second.to(weight.scalar_type());
  state.step.add_(1);
  const at::Tensor& given = parameters_[index].grad();
  const at::Tensor gradient = given.to(weight.scalar_type());
  if (!gradient.is_same(given)) lists.copied += gradient.nbytes();
  if (!weight.is_same(parameters_[index])) lists.copied += weight.nbytes();
  lists.indices.push_back(index);
  lists.weights.push_back(weight);
  lists.gradients.push_back(gradient);
  lists.first.push_back(state.first);
  lists.second.push_back(state.second);
  lists.steps.push_back(state.step);
}

// What `lists` has, and empties it.
void AdamW::update(Lists& lists, double learning_rate) {
  if (lists.indices.empty()) return;
  at::_fused_adamw_(lists.weights, lists.gradients, lists.first, lists.second, /*max_exp_avg_sqs=*/{},
                    lists.steps, learning_rate, options_.beta1, options_.beta2, options_.weight_decay,
                    options_.eps, /*amsgrad=*/false, /*maximize=*/false);
  for (std::size_t i = 0; i < lists.indices.size(); ++i) {
    at::Tensor parameter = parameters_[lists.indices[i]];
    if (lists.weights[i].is_same(parameter)) continue;
    parameter.copy_(lists.weights[i]);
    states_[lists.indices[i]].version = parameter._version();
  }
  lists = {};
}

at::Tensor AdamW::step_on_device(double learning_rate, std::optional<double> max_norm, double norm_type) {
  const at::NoGradGuard no_grad;
  DeviceNorm::Clip clip{{}, nullptr};
  if (max_norm) clip = norm_->clip(*max_norm, norm_type);
  for (const auto& adamw : on_device_) adamw->step(learning_rate, clip.factor);
  return clip.norm;
}

void AdamW::check(std::size_t index) const {
  const at::ScalarType dtype = parameters_[index].scalar_type();
  const at::ScalarType gradient = parameters_[index].grad().scalar_type();
  require(!models_.empty() || gradient == dtype || gradient == at::kFloat, "AdamW: parameter ", index, " is ",
          parameters_[index].dtype().name(), ", its gradient ", parameters_[index].grad().dtype().name(),
          "; expected the same, or a gradient in fp32");
}

// What the update writes: the parameter, or fp32 main weights that are then rounded to it. A sharded model's
// own are all there is: they are widened for the update alone, whose arithmetic and moments are fp32.
at::Tensor AdamW::updated(std::size_t index) {
  const at::Tensor& parameter = parameters_[index];
  if (!models_.empty()) return parameter.scalar_type() == at::kFloat ? parameter : parameter.to(at::kFloat);
  State& state = states_[index];
  if (parameter.grad().scalar_type() == parameter.scalar_type()) {
    state.main.reset();
    return parameter;
  }
  if (!state.main.defined() || state.version != parameter._version())
    state.main = parameter.detach().to(at::kFloat);
  return state.main;
}

int64_t AdamW::state_bytes() const noexcept {
  int64_t bytes = 0;
  for (const auto& adamw : on_device_) bytes += adamw->state_bytes();
  for (const State& state : states_) {
    if (state.first.defined()) bytes += static_cast<int64_t>(state.first.nbytes() + state.second.nbytes());
    if (state.main.defined()) bytes += static_cast<int64_t>(state.main.nbytes());
  }
  return bytes;
}

}  // namespace fsdpp::optim
