#include "fsdpp/runtime/rank_groups.h"

#include "fsdpp/base/error.h"

namespace fsdpp::runtime {

RankGroups::RankGroups(comm::MeshGroup& mesh) : whole(mesh.whole()), shard(mesh.along("shard")) {
  const auto axes = mesh.mesh().axes();
  if (axes.size() == 1) return;
  require(axes.size() == 2 && axes[0].name == "replicate", "fully_shard: the mesh has ", axes.size(),
          " axes, the first called '", axes[0].name,
          "'; expected \"replicate\" and \"shard\", in this order");
  if (axes[0].size > 1) replicate = &mesh.along("replicate");
}

}  // namespace fsdpp::runtime
