#pragma once

#include "fsdpp/comm/mesh_group.h"

namespace fsdpp::runtime {

/// The groups of ranks that one sharded model talks in. They outlive it.
struct RankGroups {
  comm::PeerGroup& all;                  // every rank of the mesh
  comm::PeerGroup& whole;                // those with the same parameters; all of them but for experts
  comm::PeerGroup& shard;                // those that shard among themselves; all of them on a flat mesh
  comm::PeerGroup* replicate = nullptr;  // those that hold the same shards; null: nobody else does
  comm::PeerGroup* experts = nullptr;    // those that differ in their experts alone; null: there are none

  explicit RankGroups(comm::PeerGroup& flat) : all(flat), whole(flat), shard(flat) {}
  /// Throws UsageError unless the mesh has the axis "shard" last, and before it none, "replicate" or
  /// "expert".
  explicit RankGroups(comm::MeshGroup& mesh);
};

}  // namespace fsdpp::runtime
