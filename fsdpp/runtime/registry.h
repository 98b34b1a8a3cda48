#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>

namespace fsdpp::runtime {

class ShardedModel;

/// A unit of a sharded model, as found by its module.
struct UnitRef {
  std::shared_ptr<ShardedModel> model;  // null: the module is no unit
  int unit = -1;
};

/// One table for the process, used by all rank threads: which module is a unit of which model.
void register_unit(const torch::nn::Module& module, std::weak_ptr<ShardedModel> model, int unit);
void unregister_unit(const torch::nn::Module& module) noexcept;
[[nodiscard]] UnitRef find_unit(const torch::nn::Module& module);

}  // namespace fsdpp::runtime
