#pragma once

#include "fsdpp/comm/mesh_group.h"

namespace fsdpp::runtime {

/// The groups of ranks that one sharded model talks in. They outlive it.
struct RankGroups {
  comm::PeerGroup& whole;                // all ranks
  comm::PeerGroup& shard;                // those that shard among themselves; all of them on a flat mesh
  comm::PeerGroup* replicate = nullptr;  // those that hold the same shards; null: nobody else does

  explicit RankGroups(comm::PeerGroup& flat) : whole(flat), shard(flat) {}
  /// Throws UsageError unless the mesh has the axes "replicate" and "shard", in this order, or "shard" alone.
  explicit RankGroups(comm::MeshGroup& mesh);
};

}  // namespace fsdpp::runtime
