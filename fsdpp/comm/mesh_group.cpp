#include "fsdpp/comm/mesh_group.h"

#include <utility>

#include "fsdpp/base/error.h"

namespace fsdpp::comm {

MeshGroup::MeshGroup(PeerGroup& whole, layout::Mesh mesh) : whole_(whole), mesh_(std::move(mesh)) {
  require(mesh_.ranks() == whole.ranks(), "the mesh has ", mesh_.ranks(), " ranks, but the group \"",
          whole.name(), "\" has ", whole.ranks(), ": give a mesh whose sizes multiply to that");
  for (std::size_t axis = 0; axis < mesh_.axes().size(); ++axis) {
    axes_.push_back(whole.part(mesh_.group(whole.rank(), static_cast<int>(axis)),
                               whole.name() + "/" + mesh_.axes()[axis].name));
  }
}

PeerGroup& MeshGroup::along(const std::string& axis) const {
  return *axes_[static_cast<std::size_t>(mesh_.axis(axis))];
}

layout::Mesh hybrid_mesh(int ranks, int replicas) {
  require(replicas >= 1 && ranks % replicas == 0, ranks, " ranks cannot be ", replicas,
          " replicas of equal size; expected a divisor of ", ranks);
  return layout::Mesh({{"replicate", replicas}, {"shard", ranks / replicas}});
}

}  // namespace fsdpp::comm
