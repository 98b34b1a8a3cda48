#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <vector>

namespace fsdpp::nn {

/// The linear layers of E experts on rows that lie together by expert: rows offsets[e-1] (0 for e = 0) up to
/// offsets[e] of `input` [rows, in] times weights[e] [out, in] transposed: [rows, out].
///
/// `offsets` [E]: int32, non-decreasing, contiguous, where the input lies; the last one is `rows` (on a GPU
/// it is not read by the host: rows behind it, and their input's gradient, are undefined). Experts may have
/// no rows; their weight gradient is then zero. `weights`: one tensor [E, out, in], or E tensors [out, in].
///
/// Of sharded weights the gradients are written straight into the gradient slot, like fused_linear's: on a
/// GPU by one kernel of ours for all experts (device/cuda_grouped.h) that reads the offsets itself. Weights
/// and input have one dtype; on a GPU bf16 is what forward and input gradient (ATen's grouped GEMM) are fast
/// for. Throws UsageError, naming sizes and dtypes, for what does not fit.
[[nodiscard]] at::Tensor grouped_linear(const at::Tensor& input, const at::Tensor& weights,
                                        const at::Tensor& offsets);
[[nodiscard]] at::Tensor grouped_linear(const at::Tensor& input, const std::vector<at::Tensor>& weights,
                                        const at::Tensor& offsets);

struct GroupedLinearOptions {
  int64_t experts;
  int64_t in;
  int64_t out;
  at::ScalarType dtype = at::kFloat;
};

/// Experts' linear layers with a fused weight gradient. Parameter: weight [experts, out, in], normal with
/// `deviation`, where `generator` draws.
class GroupedLinear : public torch::nn::Module {
 public:
  GroupedLinear(const GroupedLinearOptions& options, double deviation, at::Generator& generator);

  [[nodiscard]] at::Tensor forward(const at::Tensor& input, const at::Tensor& offsets) const {
    return grouped_linear(input, weight, offsets);
  }

  at::Tensor weight;
};

}  // namespace fsdpp::nn
