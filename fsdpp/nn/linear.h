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
  int64_t adapter_rank = 0;  // above 0: weight and bias are frozen, an adapter of this rank is trained
};

/// A linear layer with a fused weight gradient. Parameters: weight [out, in], normal with `deviation`; bias
/// [out], zeros; with an adapter (LoRA, Hu et al. 2021), whose output adapter_out(adapter_in(x)) is added,
/// adapter_in [rank, in], normal with `deviation`, and adapter_out [out, rank], zeros. All where `generator`
/// draws.
class Linear : public torch::nn::Module {
 public:
  /// `generator`: explicit, since rank threads share torch's default one.
  Linear(const LinearOptions& options, double deviation, at::Generator& generator);

  [[nodiscard]] at::Tensor forward(const at::Tensor& input) const {
    const at::Tensor output = fused_linear(input, weight, bias);
    if (!adapter_in.defined()) return output;
    return output + fused_linear(fused_linear(input, adapter_in), adapter_out);
  }

  at::Tensor weight;
  at::Tensor bias;                     // undefined without
  at::Tensor adapter_in, adapter_out;  // likewise
};

}  // namespace fsdpp::nn
