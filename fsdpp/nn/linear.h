#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>

namespace fsdpp::nn {

/// input [..., in] times weight [out, in] transposed, plus bias [out] when defined: [..., out].
///
/// When the weight is sharded its gradient is written by the wgrad GEMM straight into the gradient slot
/// (fp32, first overwriting, then adding), and the weight never gets a .grad; under runtime::OwnGradients it
/// is written into that. Else the same as at::linear. Under autocast the product has autocast's dtype.
[[nodiscard]] at::Tensor fused_linear(const at::Tensor& input, const at::Tensor& weight,
                                      const at::Tensor& bias = {});

struct LinearOptions {
  int64_t in;
  int64_t out;
  bool bias = false;
  at::ScalarType dtype = at::kFloat;
};

/// A linear layer with a fused weight gradient. Parameters: weight [out, in], normal with `deviation`; bias
/// [out], zeros; both where `generator` draws.
class Linear : public torch::nn::Module {
 public:
  /// `generator`: explicit, since rank threads share torch's default one.
  Linear(const LinearOptions& options, double deviation, at::Generator& generator);

  [[nodiscard]] at::Tensor forward(const at::Tensor& input) const {
    return fused_linear(input, weight, bias);
  }

  at::Tensor weight;
  at::Tensor bias;  // undefined without
};

}  // namespace fsdpp::nn
