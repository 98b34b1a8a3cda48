#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "fsdpp/runtime/sharded_model.h"
#include "tests/support/integer_model.h"

// The integer model for lanes that run later: every number is computed inside an operation of the compute
// lane. Outputs are allocated when an operation is issued and filled when it runs; autograd passes tensors on
// and looks at none.
namespace fsdpp::test {

/// One block of the integer model.
class DeferredBlock : public torch::nn::Module {
 public:
  [[nodiscard]] at::Tensor forward(device::Device& device, const at::Tensor& x) const;

  at::Tensor first, bias, second;
};

/// The integer model with the first weights of integer_weights(): not sharded yet.
class DeferredNet : public torch::nn::Module {
 public:
  explicit DeferredNet(const IntegerModel& model);
  /// The loss, a scalar: readable once `device`'s compute lane is through.
  [[nodiscard]] at::Tensor forward(device::Device& device, const IntegerBatch& batch) const;
  /// The units: the blocks; with `rows` behind the embedding, which is exchanged by rows.
  [[nodiscard]] std::vector<runtime::UnitSpec> units(bool rows) const;

 private:
  struct Table : torch::nn::Module {
    at::Tensor weight;
  };
  std::shared_ptr<Table> embedding_;
  std::vector<std::shared_ptr<DeferredBlock>> blocks_;
  std::shared_ptr<Table> head_;  // null when tied
};

/// weight -= rate * gradient of all shards, on the compute lane.
void deferred_descent(runtime::ShardedModel& model, float rate);

}  // namespace fsdpp::test
