#include "fsdpp/runtime/rank_groups.h"

#include "fsdpp/base/error.h"

namespace fsdpp::runtime {
namespace {

bool has_experts(const comm::MeshGroup& mesh) { return mesh.mesh().axes().front().name == "expert"; }

}  // namespace

RankGroups::RankGroups(comm::MeshGroup& mesh)
    : all(mesh.whole()),
      whole(has_experts(mesh) ? mesh.along("shard") : mesh.whole()),
      shard(mesh.along("shard")) {
  const auto axes = mesh.mesh().axes();
  if (axes.size() == 1) return;
  require(axes.size() == 2 && (axes[0].name == "replicate" || axes[0].name == "expert"),
          "fully_shard: the mesh has ", axes.size(), " axes, the first called '", axes[0].name,
          "'; expected \"replicate\" and \"shard\", or \"expert\" and \"shard\", in this order");
  if (axes[0].size == 1) return;
  (axes[0].name == "expert" ? experts : replicate) = &mesh.along(axes[0].name);
}

}  // namespace fsdpp::runtime
