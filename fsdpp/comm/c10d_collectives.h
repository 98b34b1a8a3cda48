#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>

#include "fsdpp/comm/peer_group.h"

namespace c10d {
class Backend;
}

namespace fsdpp::comm {

/// Collectives of a c10d backend that the caller has (NCCL, gloo, MPI, ...; of a ProcessGroup: its
/// getBackend()), on contiguous shards. Sums alone: gloo has no average.
///
/// `gathers`, `reduces`: one each where a gather may overlap a reduce, else the same; their ranks are
/// `group`'s. `gpu`: whose memory they are given, or -1: the host's. A call that fails, or on the host does
/// not end in the group's timeout, throws PeerError where the group knows a lost rank, else EnvironmentError;
/// both name group and rank. Throws UsageError for a backend of other ranks. `group` outlives the result.
[[nodiscard]] std::unique_ptr<Collectives> make_c10d_collectives(PeerGroup& group, int gpu,
                                                                 c10::intrusive_ptr<c10d::Backend> gathers,
                                                                 c10::intrusive_ptr<c10d::Backend> reduces);

/// From now on the lanes of `group`'s ranks talk through `backend`, not through each other's memory: for
/// ranks on different nodes. Before the first model, and of an axis of a mesh by every rank of the mesh:
/// `use_c10d(mesh.along("replicate"), backend)`. The hosts go on as before. Throws as
/// make_c10d_collectives().
void use_c10d(PeerGroup& group, const c10::intrusive_ptr<c10d::Backend>& backend);

}  // namespace fsdpp::comm
