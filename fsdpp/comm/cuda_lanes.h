#pragma once

#include <memory>

#include "fsdpp/comm/lanes.h"
#include "fsdpp/comm/peer_group.h"

namespace fsdpp::comm {

/// Lanes of GPU `gpu` that pull from peers' symmetric memory. Collective.
[[nodiscard]] std::unique_ptr<LaneTransport> make_cuda_peer_lanes(PeerGroup& group, int gpu,
                                                                  int lost_exit_code);

/// Lanes of GPU `gpu` that communicate by NCCL's collectives, sums in NCCL's order. Collective.
[[nodiscard]] std::unique_ptr<LaneTransport> make_nccl_lanes(PeerGroup& group, int gpu);

}  // namespace fsdpp::comm
