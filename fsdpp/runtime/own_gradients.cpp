#include "fsdpp/runtime/own_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/runtime/graph_task.h"
#include "fsdpp/runtime/sink.h"

namespace fsdpp::runtime {

/// One weight whose gradient fused layers write into its `.grad`.
class OwnGradient final : public SinkOwner {
 public:
  OwnGradient(at::Tensor weight, at::ScalarType dtype)
      : weight_(std::move(weight)),
        dtype_(dtype),
        dtype_before_(weight_.grad_dtype()),
        accumulator_(torch::autograd::impl::grad_accumulator(weight_)) {
    weight_.set_grad_dtype(dtype);
  }
  ~OwnGradient() override {
    const bool fits = !weight_.grad().defined() || weight_.grad().scalar_type() == dtype_before_;
    if (fits) weight_.set_grad_dtype(dtype_before_);
  }
  [[nodiscard]] const at::Tensor& weight() const noexcept { return weight_; }

  void ensure_resident() override {}

  std::optional<GradSink> open() override {
    first_.reset();  // of a product that raised
    require(torch::autograd::impl::try_get_grad_accumulator(weight_) == accumulator_,
            "a weight of OwnGradients has got another gradient accumulator (by to(), or set_data); make such "
            "changes before, or make OwnGradients anew");
    if (at::GradMode::is_enabled() || is_hooked() || !runs_in_graph_task(accumulator_.get()))
      return std::nullopt;
    const at::Tensor& gradient = weight_.grad();
    if (!gradient.defined()) {
      first_ = at::empty(weight_.sizes(), weight_.options().dtype(dtype_).requires_grad(false));
      return GradSink{first_, GradSink::Mode::overwrite};
    }
    const bool ours = gradient.layout() == at::kStrided && gradient.is_contiguous() &&
                      gradient.scalar_type() == dtype_ && !gradient.requires_grad();
    if (!ours) return std::nullopt;
    return GradSink{gradient, GradSink::Mode::add};
  }
  void report() override {
    if (first_.defined()) weight_.mutable_grad() = std::exchange(first_, {});
  }

 private:
  // Somebody looks at each gradient, or changes it: a running sum would be wrong there.
  [[nodiscard]] bool is_hooked() const {
    return !accumulator_->pre_hooks().empty() || !accumulator_->tensor_pre_hooks().empty();
  }

  at::Tensor first_;  // being written
  at::Tensor weight_;
  at::ScalarType dtype_;
  std::optional<at::ScalarType> dtype_before_;
  std::shared_ptr<torch::autograd::Node> accumulator_;
};

namespace {

void check(const at::Tensor& weight, std::size_t index, at::ScalarType dtype) {
  require(weight.defined() && weight.is_leaf() && weight.requires_grad(), "OwnGradients: weight ", index,
          " is not a leaf that requires a gradient; give parameters that are trained");
  require(dtype == at::kFloat || dtype == weight.scalar_type(), "OwnGradients: gradients in ",
          c10::toString(dtype), " of weight ", index, ", which is ", weight.dtype().name(),
          "; expected fp32 or the weight's own dtype");
  require(!weight.grad().defined() || weight.grad().scalar_type() == dtype, "OwnGradients: weight ", index,
          " has a gradient in ", weight.grad().dtype().name(), "; expected none, or one in ",
          c10::toString(dtype), ": clear it with zero_grad(true)");
  require(sink_of(weight) == nullptr, "OwnGradients: weight ", index,
          " has a sink already (it belongs to a sharded model, or was given before); give each weight once");
}

}  // namespace

OwnGradients::OwnGradients(std::vector<at::Tensor> weights, at::ScalarType dtype) {
  try {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      check(weights[i], i, dtype);
      owners_.push_back(std::make_shared<OwnGradient>(weights[i], dtype));
      register_sink(weights[i], owners_.back());
    }
  } catch (...) {
    for (const auto& owner : owners_) unregister_sink(owner->weight());
    throw;
  }
}

OwnGradients::~OwnGradients() {
  for (const auto& owner : owners_) unregister_sink(owner->weight());
}

}  // namespace fsdpp::runtime
