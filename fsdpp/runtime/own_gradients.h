#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace fsdpp::runtime {

class OwnGradient;

/// Fused weight gradients without sharding. While it lives, fused layers add the gradients of `weights` into
/// the weights' own `.grad`, which is `dtype`: the first product of a backward after zero_grad(set_to_none)
/// is written, later ones are added by the GEMM into the same memory. So microbatches, of a pipeline for
/// example, copy and add nothing, and bf16 weights get sums in fp32 (through libtorch's grad_dtype).
///
/// Where a backward wants a gradient itself (autograd::grad, create_graph, a tensor hook on the weight) it
/// gets that one product, as if nothing was fused. optim::AdamW takes fp32 gradients of bf16 weights; for an
/// optimizer that does not, give the weights' dtype.
class OwnGradients {
 public:
  /// Throws UsageError, naming what it got, for a weight that is no leaf, needs no gradient or has a sink
  /// already (a sharded model's), one given twice, or a dtype other than fp32 and the weight's own.
  explicit OwnGradients(std::vector<at::Tensor> weights, at::ScalarType dtype = at::kFloat);
  ~OwnGradients();
  OwnGradients(const OwnGradients&) = delete;
  OwnGradients& operator=(const OwnGradients&) = delete;

 private:
  std::vector<std::shared_ptr<OwnGradient>> owners_;
};

}  // namespace fsdpp::runtime
