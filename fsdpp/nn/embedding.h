#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>

namespace fsdpp::nn {

/// Rows of weight [vocabulary, dim] at indices [...] (int64): [..., dim].
///
/// When the weight is sharded its gradient is summed straight into an fp32 gradient slot; one in bf16 gets a
/// sum made in fp32 beside it, and so does an own gradient (runtime/own_gradients.h) on a GPU for which no
/// device was made. Else as at::embedding.
[[nodiscard]] at::Tensor fused_embedding(const at::Tensor& weight, const at::Tensor& indices);

/// An embedding table with a fused gradient. Parameter: weight [vocabulary, dim], normal with `deviation`,
/// where `generator` draws.
class Embedding : public torch::nn::Module {
 public:
  Embedding(int64_t vocabulary, int64_t dim, double deviation, at::Generator& generator,
            at::ScalarType dtype = at::kFloat);

  [[nodiscard]] at::Tensor forward(const at::Tensor& indices) const {
    return fused_embedding(weight, indices);
  }

  /// forward() as a unit of its own: gathered for it, unless its rows are exchanged.
  [[nodiscard]] at::Tensor look_up(const at::Tensor& indices) const;

  at::Tensor weight;
};

}  // namespace fsdpp::nn
