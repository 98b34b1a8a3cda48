#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <utility>
#include <vector>

#include "fsdpp/comm/mesh_group.h"
#include "fsdpp/runtime/sharded_model.h"

namespace fsdpp {

/// Shards `root`'s parameters over `group`, in place. Collective.
///
/// `units`: submodules that are gathered and reduced one by one, usually the blocks, in the order of the
/// forward; what they do not hold belongs to the root unit. A parameter that several units share belongs to
/// the root. The modules and their parameters keep their identity: `root` is used as before, but units (and
/// `root` itself) are entered through fsdpp::call or fsdpp::Unit. `group` and the returned object must
/// outlive every use. `device`: lanes to run on; default: the host's.
///
/// Parameters may be fp32, bf16 or fp16 (main weights and gradients are fp32 unless Options say otherwise,
/// sums always), on the CPU, contiguous or not. Throws UsageError, naming module or parameter, for a unit
/// outside `root`, one given twice, a parameter that is sharded already, is no leaf, overlaps another in
/// memory, or has another dtype or device; and one that lists all parameters and buffers that have no data
/// (deferred initialisation). The model is then as it was.
[[nodiscard]] std::shared_ptr<runtime::ShardedModel> fully_shard(
    comm::PeerGroup& group, const std::shared_ptr<torch::nn::Module>& root,
    const std::vector<runtime::UnitSpec>& units, runtime::Options options = {},
    std::unique_ptr<device::Device> device = nullptr);

/// The same on a mesh with the axes "replicate" and "shard" (comm::hybrid_mesh): parameters are sharded over
/// the ranks along "shard", and those along "replicate" hold the same shards (HSDP), or with
/// Options::shard_optimizer_over_replicas each a part of the main weights (HFSDP). `mesh` must outlive every
/// use.
///
/// Experts: on a mesh with the axes "expert" and "shard" ranks along "expert" have parameters of their own,
/// each sharded along "shard"; means divide by all ranks of the mesh, whose tokens the experts see. Experts
/// are a sharded model of their own: shard them first, with a module that holds them all as `root` and each
/// layer's as a unit; fully_shard() of the module around them then leaves them out. Enter both roots for a
/// forward (fsdpp::call_as), and clip and step both by one optim::AdamW.
[[nodiscard]] std::shared_ptr<runtime::ShardedModel> fully_shard(
    comm::MeshGroup& mesh, const std::shared_ptr<torch::nn::Module>& root,
    const std::vector<runtime::UnitSpec>& units, runtime::Options options = {},
    std::unique_ptr<device::Device> device = nullptr);

/// The same with one module per unit, for any module type.
template <class GroupOrMesh, class Module>
[[nodiscard]] std::shared_ptr<runtime::ShardedModel> fully_shard(
    GroupOrMesh& group, const std::shared_ptr<torch::nn::Module>& root,
    const std::vector<std::shared_ptr<Module>>& units, runtime::Options options = {},
    std::unique_ptr<device::Device> device = nullptr) {
  std::vector<runtime::UnitSpec> specs;
  for (const auto& unit : units) specs.push_back({{unit}});
  return fully_shard(group, root, specs, options, std::move(device));
}

}  // namespace fsdpp
