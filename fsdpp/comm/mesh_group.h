#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fsdpp/comm/peer_group.h"
#include "fsdpp/layout/mesh.h"

namespace fsdpp::comm {

/// The ranks of a group, arranged in a mesh: this rank's groups along its axes. One object per rank.
class MeshGroup {
 public:
  /// Collective. `whole` outlives this. Throws UsageError unless the mesh has as many ranks as `whole`.
  MeshGroup(PeerGroup& whole, layout::Mesh mesh);

  [[nodiscard]] PeerGroup& whole() const noexcept { return whole_; }
  [[nodiscard]] const layout::Mesh& mesh() const noexcept { return mesh_; }
  /// The ranks that differ from this one along `axis` alone, itself included. Throws UsageError that lists
  /// the axes there are.
  [[nodiscard]] PeerGroup& along(const std::string& axis) const;

 private:
  PeerGroup& whole_;
  layout::Mesh mesh_;
  std::vector<std::unique_ptr<PeerGroup>> axes_;
};

/// The mesh of a hybrid strategy (PyTorch's HSDP): `replicas` groups of neighbouring ranks that shard among
/// themselves. Axes "replicate" and "shard". Throws UsageError unless `replicas` divides `ranks`.
[[nodiscard]] layout::Mesh hybrid_mesh(int ranks, int replicas);

}  // namespace fsdpp::comm
