#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>

namespace fsdpp::nn {

/// x / sqrt(mean(x^2) + epsilon) * weight over the last dimension (Zhang and Sennrich 2019). Parameter:
/// weight [dim], ones, with `options`.
class RMSNorm : public torch::nn::Module {
 public:
  RMSNorm(int64_t dim, double epsilon, at::TensorOptions options = at::kFloat);

  [[nodiscard]] at::Tensor forward(const at::Tensor& input) const;

  at::Tensor weight;

 private:
  double epsilon_;
};

}  // namespace fsdpp::nn
