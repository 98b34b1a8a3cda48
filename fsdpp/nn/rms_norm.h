#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>

namespace fsdpp::nn {

/// x / sqrt(mean(x^2) + epsilon) * weight over the last dimension (Zhang and Sennrich 2019). Parameter:
/// weight [dim], fp32, ones.
class RMSNorm : public torch::nn::Module {
 public:
  RMSNorm(int64_t dim, double epsilon);

  [[nodiscard]] at::Tensor forward(const at::Tensor& input) const;

  at::Tensor weight;

 private:
  double epsilon_;
};

}  // namespace fsdpp::nn
