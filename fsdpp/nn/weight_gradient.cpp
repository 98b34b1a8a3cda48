#include "fsdpp/nn/weight_gradient.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

namespace fsdpp::nn {

using runtime::GradSink;

namespace {

void write(at::Tensor view, const GradSink& sink, const at::Tensor& left, const at::Tensor& right) {
  if (sink.mode == GradSink::Mode::overwrite) {
    at::mm_out(view, left, right);
  } else {
    view.addmm_(left, right, sink.kept, sink.scale);
  }
}

// On a GPU the GEMM takes 16-bit factors and writes fp32 itself; ATen has no such product on the CPU.
void write_mixed_product(const GradSink& sink, const at::Tensor& left, const at::Tensor& right) {
  at::Tensor view = sink.view;
  if (view.scalar_type() == left.scalar_type()) return write(view, sink, left, right);
  if (sink.mode == GradSink::Mode::overwrite) {
    at::mm_out(view, left, right, at::kFloat);
  } else {
    at::addmm_out(view, view, left, right, at::kFloat, sink.kept, sink.scale);
  }
}

}  // namespace

void write_weight_gradient(const GradSink& sink, const at::Tensor& grad, const at::Tensor& input) {
  const at::ScalarType factors = input.scalar_type();
  const bool one_gemm = sink.view.scalar_type() == at::kFloat || sink.view.scalar_type() == factors;
  if (input.is_cuda() && factors != at::kFloat && factors == grad.scalar_type() && one_gemm)
    return write_mixed_product(sink, grad.t(), input);
  const at::Tensor left = grad.to(at::kFloat).t();
  const at::Tensor right = input.to(at::kFloat);
  if (sink.view.scalar_type() == at::kFloat) return write(sink.view, sink, left, right);
  const at::Tensor product = at::mm(left, right);
  at::Tensor view = sink.view;
  if (sink.mode == GradSink::Mode::overwrite) {
    view.copy_(product);
  } else {
    view.mul_(sink.kept).add_(product, sink.scale);
  }
}

}  // namespace fsdpp::nn
