#include "fsdpp/nn/initial.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace fsdpp::nn {

at::Tensor normal(at::IntArrayRef sizes, double deviation, at::Generator& generator, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  return at::empty(sizes, at::TensorOptions(generator.device()).dtype(dtype))
      .normal_(0, deviation, generator);
}

}  // namespace fsdpp::nn
