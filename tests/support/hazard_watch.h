#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "fsdpp/comm/connect.h"
#include "fsdpp/runtime/fully_shard.h"

namespace fsdpp::test {

/// comm::run_thread_ranks() with every operation of all ranks looked at by the hazard checker: the running
/// test fails with its reports. Models must be made by watched_shard(), on the ranks' own threads, and go
/// before `body` returns.
void run_watched_ranks(int ranks, const std::function<void(comm::PeerGroup&)>& body,
                       std::chrono::milliseconds timeout = std::chrono::milliseconds(20000));

/// fully_shard() whose device the watch of the run sees from its first operation on. The n-th models of all
/// ranks are taken for one sharded model.
[[nodiscard]] std::shared_ptr<runtime::ShardedModel> watched_shard(
    comm::PeerGroup& group, const std::shared_ptr<torch::nn::Module>& root,
    const std::vector<runtime::UnitSpec>& units, runtime::Options options = {},
    std::unique_ptr<device::Device> device = nullptr);

/// From now on watched_shard() of a group arranges its ranks in a hybrid mesh of `replicas` (1: none).
void watch_replicas(int replicas) noexcept;

/// The same on a mesh.
[[nodiscard]] std::shared_ptr<runtime::ShardedModel> watched_shard(
    comm::MeshGroup& mesh, const std::shared_ptr<torch::nn::Module>& root,
    const std::vector<runtime::UnitSpec>& units, runtime::Options options = {},
    std::unique_ptr<device::Device> device = nullptr);

/// The same with one module per unit, for any module type.
template <class GroupOrMesh, class Module>
[[nodiscard]] std::shared_ptr<runtime::ShardedModel> watched_shard(
    GroupOrMesh& group, const std::shared_ptr<torch::nn::Module>& root,
    const std::vector<std::shared_ptr<Module>>& units, runtime::Options options = {},
    std::unique_ptr<device::Device> device = nullptr) {
  std::vector<runtime::UnitSpec> specs;
  for (const auto& unit : units) specs.push_back({{unit}});
  return watched_shard(group, root, specs, options, std::move(device));
}

/// Operations that watches of this process have checked so far. Printed at the end of the program, once, as
/// "hazards: N operations checked".
[[nodiscard]] uint64_t hazards_checked() noexcept;

}  // namespace fsdpp::test
