#include "fsdpp/nn/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <torch/csrc/autograd/custom_function.h>

namespace fsdpp::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Turned back by direction -1: that is the gradient.
class Rotation : public torch::autograd::Function<Rotation> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin, double direction) {
    context->save_for_backward({cos, sin});
    context->saved_data["direction"] = direction;
    const int64_t half = x.size(-1) / 2;
    const at::Tensor angle = sin.narrow(-1, 0, half);
    at::Tensor turned = at::mul(x, cos);
    turned.narrow(-1, 0, half).addcmul_(x.narrow(-1, half, half), angle, -direction);
    turned.narrow(-1, half, half).addcmul_(x.narrow(-1, 0, half), angle, direction);
    return turned;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
    const variable_list saved = context->get_saved_variables();
    const double direction = context->saved_data["direction"].toDouble();
    return {apply(gradients[0], saved[0], saved[1], -direction), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

Rotary rotary(int64_t length, int64_t head_size, double theta, at::TensorOptions options) {
  const at::Tensor exponents = at::arange(0, head_size, 2, at::kDouble) / static_cast<double>(head_size);
  const at::Tensor angles = at::outer(at::arange(length, at::kDouble), at::pow(theta, -exponents));
  const at::Tensor both = at::cat({angles, angles}, -1);
  return {both.cos().to(options), both.sin().to(options)};
}

at::Tensor rotate(const at::Tensor& x, const Rotary& rotary) {
  return Rotation::apply(x, rotary.cos, rotary.sin, 1.0);
}

}  // namespace fsdpp::nn
