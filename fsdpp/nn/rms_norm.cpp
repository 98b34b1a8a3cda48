#include "fsdpp/nn/rms_norm.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/rms_norm.h>

namespace fsdpp::nn {

RMSNorm::RMSNorm(int64_t dim, double epsilon, at::TensorOptions options)
    : weight(register_parameter("weight", at::ones({dim}, options))), epsilon_(epsilon) {}

at::Tensor RMSNorm::forward(const at::Tensor& input) const {
  return at::rms_norm(input, {input.size(-1)}, weight, epsilon_);
}

}  // namespace fsdpp::nn
