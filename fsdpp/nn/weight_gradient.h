#pragma once

#include <ATen/core/Tensor.h>

#include "fsdpp/runtime/sink.h"

namespace fsdpp::nn {

/// Writes the weight gradient [out, in] = grad^T [out, n] * input [n, in] into `sink`, as its mode says, by
/// one GEMM whose output is the sink; but on the CPU in fp32 first where the sink is bf16. n may be 0.
void write_weight_gradient(const runtime::GradSink& sink, const at::Tensor& grad, const at::Tensor& input);

}  // namespace fsdpp::nn
