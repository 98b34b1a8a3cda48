#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/comm/lanes.h"
#include "fsdpp/comm/peer_group.h"

namespace fsdpp::comm {

/// Bytes of symmetric memory for a board of `channels` channels.
[[nodiscard]] std::size_t cuda_board_bytes(int ranks, std::size_t channels);

/// Counters in `pads`, symmetric memory of cuda_board_bytes(): each rank stores its own into every peer's,
/// and waits on its own memory. A host thread watches the waits, see use_cuda_lanes(); `has_left` tells it
/// whether a rank has left the group.
[[nodiscard]] std::unique_ptr<LaneSignals> make_cuda_board(PeerGroup& group, int gpu,
                                                           std::shared_ptr<PeerMemory> pads,
                                                           std::vector<std::string> names, int lost_exit_code,
                                                           std::function<bool(int rank)> has_left);

}  // namespace fsdpp::comm
