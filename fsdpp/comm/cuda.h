#pragma once

#include "fsdpp/comm/peer_group.h"

namespace fsdpp::comm {

/// How the GPUs of a group reach each other.
enum class CudaVia {
  automatic,  // peers where every GPU can address every other's memory, else NCCL
  peers,      // symmetric memory: copy-engine pulls, our own signals and sums
  nccl,       // c10d's collectives
};

struct CudaLaneOptions {
  CudaVia via = CudaVia::automatic;
  int lost_exit_code = 4;
  /// Lets several ranks use one GPU, through peers: their processes take turns on it. To test more ranks than
  /// there are GPUs, not for speed. The same on every rank.
  bool share_gpus = false;
};

/// Gives `group`, whose ranks are processes of one host with a GPU each (see share_gpus), lanes that run on
/// GPU `gpu`. Collective; before the first model.
///
/// A host thread watches the waits on the GPU: when a rank is lost, or does not come within the group's
/// timeout, it says so, naming rank and channel, and ends the process with `lost_exit_code` (a wait on a GPU
/// cannot be broken off). Throws UsageError when there is no such GPU, two ranks name the same one and may
/// not share it, the ranks are threads, or peers are asked for or needed where GPUs cannot address each other
/// (naming both). Ranks that share a GPU have libtorch's TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES set.
void use_cuda_lanes(PeerGroup& group, int gpu, CudaLaneOptions options = {});

}  // namespace fsdpp::comm
