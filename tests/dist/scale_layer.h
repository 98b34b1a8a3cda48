#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/custom_function.h>

#include "fsdpp/nn/sink_capsule.h"

// The example of docs/custom_gradients.md: a layer of somebody else's that writes its weight gradient where
// fsdpp wants it.
namespace example {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// x [..., n] * weight [n].
class Scale : public torch::autograd::Function<Scale> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    fsdpp::nn::keep_owner(*context, "weight", weight);  // nothing, when nobody wants a fused gradient of it
    context->save_for_backward({x, weight});
    return x * weight;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    fsdpp::runtime::SinkOwner* owner = fsdpp::nn::kept_owner(*context, "weight");
    if (owner != nullptr) owner->ensure_resident();  // before the weight is read
    const variable_list saved = context->get_saved_variables();
    const at::Tensor product = (gradients[0] * saved[0]).reshape({-1, saved[0].size(-1)});
    at::Tensor weight_gradient;  // stays undefined when it was written
    const auto sink = owner != nullptr ? owner->open() : std::nullopt;
    if (sink && sink->mode == fsdpp::runtime::GradSink::Mode::overwrite) {
      at::Tensor view = sink->view;
      at::sum_out(view, product, at::IntArrayRef{0}, /*keepdim=*/false, view.scalar_type());
    } else if (sink) {
      sink->view.add_(product.sum(at::IntArrayRef{0}));
    } else {
      weight_gradient = product.sum(at::IntArrayRef{0});  // as without fsdpp
    }
    if (sink) owner->report();
    return {gradients[0] * saved[1], weight_gradient};
  }
};

}  // namespace example
