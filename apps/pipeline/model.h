#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fsdpp/nn/linear.h"

namespace fsdpp::pipeline {

/// x -> min(relu(W x + b), 3) twice: of whole numbers, so that any order of sums gives the same bits.
class Chunk : public torch::nn::Module {
 public:
  /// The `index`-th chunk of the model: the same weights wherever it is made. `fused`: of our layers, else of
  /// libtorch's alone.
  Chunk(int index, bool fused);
  [[nodiscard]] at::Tensor forward(const at::Tensor& input) const;

 private:
  bool fused_;
  std::vector<std::shared_ptr<nn::Linear>> layers_;
};

inline constexpr int kChunks = 4;  // of the whole model

/// Whole numbers from -1 to 1, [4, width], of data rank `data_rank`'s `microbatch` in `step`.
[[nodiscard]] at::Tensor batch(int step, int data_rank, int microbatch);
/// The loss of the model's last output: a sum of whole numbers.
[[nodiscard]] at::Tensor loss(const at::Tensor& output);
/// weight -= sign(gradient): weights stay whole numbers.
void update(const std::vector<at::Tensor>& weights);

/// The whole model's weights after `steps` on one process, in fp32: chunk by chunk.
[[nodiscard]] std::vector<at::Tensor> one_process(int steps, int data_ranks, int microbatches);

}  // namespace fsdpp::pipeline
