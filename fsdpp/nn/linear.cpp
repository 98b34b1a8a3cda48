#include "fsdpp/nn/linear.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <optional>

#include "fsdpp/nn/initial.h"
#include "fsdpp/nn/sink_capsule.h"
#include "fsdpp/nn/weight_gradient.h"

namespace fsdpp::nn {
namespace {

using runtime::GradSink;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The dtype autocast would give a matrix product of tensors like `input`, if it is on.
std::optional<at::ScalarType> autocast_dtype(const at::Tensor& input) {
  const c10::DeviceType place = input.device().type();
  if (!at::autocast::is_autocast_enabled(place)) return std::nullopt;
  return at::autocast::get_autocast_dtype(place);
}

// [..., width] as [rows, width], also where there is no element to tell how many.
at::Tensor rows_of(const at::Tensor& tensor) {
  const at::IntArrayRef outer = tensor.sizes().slice(0, static_cast<std::size_t>(tensor.dim() - 1));
  return tensor.reshape({c10::multiply_integers(outer), tensor.size(-1)});
}

void write_row_sum(const GradSink& sink, const at::Tensor& grad) {
  at::Tensor view = sink.view;
  if (sink.mode == GradSink::Mode::overwrite) {
    at::sum_out(view, grad, at::IntArrayRef{0}, /*keepdim=*/false, view.scalar_type());
  } else {
    if (sink.kept != 1) view.mul_(sink.kept);
    view.add_(at::sum(grad, at::IntArrayRef{0}, /*keepdim=*/false, at::kFloat), sink.scale);
  }
}

class FusedLinear : public torch::autograd::Function<FusedLinear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    keep_owner(*context, "weight", weight);
    if (bias) keep_owner(*context, "bias", *bias);
    const auto dtype = autocast_dtype(input);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::Tensor used = dtype ? input.to(*dtype) : input;
    context->save_for_backward({used, weight});
    context->saved_data["input_dtype"] = input.scalar_type();
    context->saved_data["biased"] = bias.has_value();
    if (!dtype) return at::linear(used, weight, bias);
    return at::linear(used, weight.to(*dtype), bias ? std::optional(bias->to(*dtype)) : std::nullopt);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
    runtime::SinkOwner* owner = kept_owner(*context, "weight");
    if (owner != nullptr) owner->ensure_resident();
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& input = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor grad = gradients[0].to(input.scalar_type());
    variable_list result(3);
    if (context->needs_input_grad(0)) {
      result[0] = at::matmul(grad, weight.to(grad.scalar_type()))
                      .to(static_cast<at::ScalarType>(context->saved_data["input_dtype"].toInt()));
    }
    const at::Tensor rows = rows_of(grad);
    if (context->needs_input_grad(1)) result[1] = weight_gradient(owner, rows, input, weight);
    if (context->saved_data["biased"].toBool() && context->needs_input_grad(2)) {
      result[2] = bias_gradient(kept_owner(*context, "bias"), rows, weight.scalar_type());
    }
    return result;
  }

 private:
  static at::Tensor weight_gradient(runtime::SinkOwner* owner, const at::Tensor& rows,
                                    const at::Tensor& input, const at::Tensor& weight) {
    const at::Tensor flat = rows_of(input);
    const auto write = [rows, flat](const GradSink& sink, int64_t first, int64_t last) {
      write_weight_gradient(sink, rows.narrow(1, first, last - first), flat);
    };
    if (owner != nullptr && owner->contribute(write)) return {};
    return at::mm(rows.t(), flat).to(weight.scalar_type());
  }

  static at::Tensor bias_gradient(runtime::SinkOwner* owner, const at::Tensor& rows, at::ScalarType dtype) {
    const auto write = [rows](const GradSink& sink, int64_t first, int64_t last) {
      write_row_sum(sink, rows.narrow(1, first, last - first));
    };
    if (owner != nullptr && owner->contribute(write)) return {};
    return at::sum(rows, at::IntArrayRef{0}).to(dtype);
  }
};

}  // namespace

at::Tensor fused_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  const std::optional<at::Tensor> given = bias.defined() ? std::optional(bias) : std::nullopt;
  if (at::GradMode::is_enabled() && runtime::sink_of(weight) != nullptr) {
    return FusedLinear::apply(input, weight, given);
  }
  return at::linear(input, weight, given);
}

Linear::Linear(const LinearOptions& options, double deviation, at::Generator& generator)
    : weight(register_parameter("weight",
                                normal({options.out, options.in}, deviation, generator, options.dtype))) {
  if (options.bias) bias = register_parameter("bias", at::zeros({options.out}, weight.options()));
  if (options.adapter_rank == 0) return;
  const int64_t rank = options.adapter_rank;
  for (const at::Tensor& base : parameters()) base.requires_grad_(false);
  adapter_in =
      register_parameter("adapter_in", normal({rank, options.in}, deviation, generator, options.dtype));
  adapter_out = register_parameter("adapter_out",
                                   at::zeros({options.out, rank}, weight.options().requires_grad(false)));
}

}  // namespace fsdpp::nn
