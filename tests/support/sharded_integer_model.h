#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "fsdpp/nn/embedding.h"
#include "fsdpp/nn/linear.h"
#include "fsdpp/nn/recompute.h"
#include "fsdpp/runtime/sharded_model.h"
#include "tests/support/integer_model.h"

namespace fsdpp::test {

/// One block of the integer model, of our layers.
class IntegerBlock : public torch::nn::Module {
 public:
  IntegerBlock(const IntegerModel& model, at::Generator& generator);
  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const;

 private:
  std::shared_ptr<nn::Linear> first_, second_;
};

/// The integer model of our layers, with the first weights of integer_weights(): not sharded yet.
class IntegerNet : public torch::nn::Module {
 public:
  explicit IntegerNet(const IntegerModel& model);
  /// sum(logits * coefficients), a scalar.
  [[nodiscard]] at::Tensor forward(const IntegerBatch& batch) const;
  nn::Recompute recompute = nn::Recompute::none;  // of each block's activations

  /// The blocks, in order: the units.
  [[nodiscard]] std::vector<std::shared_ptr<torch::nn::Module>> units() const;
  /// The same behind the embedding, which is exchanged by rows (shard with row_exchange_bytes = 0).
  [[nodiscard]] std::vector<runtime::UnitSpec> units_with_rows() const;

 private:
  std::shared_ptr<nn::Embedding> embedding_;
  std::vector<std::shared_ptr<IntegerBlock>> blocks_;
  std::shared_ptr<nn::Linear> head_;  // null when tied
};

}  // namespace fsdpp::test
