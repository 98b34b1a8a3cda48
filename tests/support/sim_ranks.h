#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "fsdpp/comm/peer_group.h"
#include "fsdpp/device/sim.h"

namespace fsdpp::test {

/// Runs `body` on threads that are the ranks of one simulated world: hosts and lanes go on by turns, in an
/// order of the seed. Everybody's waits for peers let the others go on. Rethrows what went wrong first;
/// SimFailure when nothing could run any more. Returns a number for the order in which everything ran.
uint64_t run_sim_ranks(int ranks, device::SimOptions options,
                       const std::function<void(comm::PeerGroup&, device::SimWorld&)>& body);

}  // namespace fsdpp::test
