#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "fsdpp/comm/peer_group.h"

namespace fsdpp::comm {

/// Who this process is among the processes of a job.
struct Identity {
  int rank = 0;
  int ranks = 1;
  std::string address;       // of the store; empty when ranks == 1 and none was given
  int port = 0;              // of the store
  bool agent_store = false;  // a launcher (torchrun, `fsdpp train --ranks`) already runs the store
};

/// Reads the identity from the environment: torchrun's RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
/// TORCHELASTIC_USE_AGENT_STORE; else Open MPI's OMPI_COMM_WORLD_RANK and _SIZE, or MPICH's PMI_RANK and
/// PMI_SIZE, or Slurm's SLURM_PROCID and SLURM_NTASKS (these with MASTER_ADDR, default 127.0.0.1 when all
/// ranks are on one host, and MASTER_PORT, default 29500). None of them: one rank that needs no launcher.
/// Throws UsageError that names the variable and its value when one is malformed, missing or contradictory.
[[nodiscard]] Identity identity_from_environment();

/// Connects this process to its peers over shared memory; a group of one needs no store.
/// Throws EnvironmentError naming host and port when no store answers in time, and UsageError when ranks are
/// on different hosts (shared memory cannot span them).
[[nodiscard]] std::unique_ptr<PeerGroup> connect(const Identity& identity, std::chrono::milliseconds timeout);

/// connect(identity_from_environment(), timeout).
[[nodiscard]] std::unique_ptr<PeerGroup> connect(
    std::chrono::milliseconds timeout = std::chrono::milliseconds(60000));

/// Runs `body` on `ranks` threads of this process, each with a group of its own, and joins them. When ranks
/// throw, rethrows the first that is not the consequence of another (a PeerError only when nothing else was
/// thrown).
void run_thread_ranks(int ranks, const std::function<void(PeerGroup&)>& body,
                      std::chrono::milliseconds timeout = std::chrono::milliseconds(20000));

}  // namespace fsdpp::comm
