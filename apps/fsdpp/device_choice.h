#pragma once

#include <string>
#include <vector>

#include "fsdpp/comm/connect.h"

namespace fsdpp::app {

/// What --device asks for.
enum class DeviceChoice {
  automatic,  // GPUs where there are some, else the CPU
  cpu,
  cuda,
  cuda_shared,  // GPUs, on each of which several ranks may take turns
};

/// Where a rank computes.
struct Place {
  int gpu = -1;           // this process's number of its GPU; -1: the CPU
  bool shared = false;    // ranks may share GPUs
  std::string note = {};  // why on the CPU, where a GPU might be expected
};

/// Where the job's `ranks` compute, for one of them or for their launcher; the same on every rank: `gpu` is 0
/// for any GPU, see gpu_of().
///
/// Does not return where GPUs are wanted but this program computes on CPUs alone: then fsdpp-cuda, which lies
/// beside it, goes on in its place as `command`. Throws UsageError that names what is
/// missing and the remedy, and EnvironmentError when fsdpp-cuda cannot be started.
[[nodiscard]] Place choose_place(DeviceChoice wanted, const comm::Identity& identity, int ranks,
                                 const std::vector<std::string>& command);

/// The GPU of the rank that this process is: LOCAL_RANK as torchrun and our launcher give it, else the rank,
/// since all ranks are on one host; where GPUs are `shared` these go round. Throws UsageError that names both
/// when there is no such GPU.
[[nodiscard]] int gpu_of(const comm::Identity& identity, bool shared);

}  // namespace fsdpp::app
