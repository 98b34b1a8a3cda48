#pragma once

#include <cstdint>
#include <memory>

#include "fsdpp/comm/peer_group.h"
#include "fsdpp/device/device.h"

// What `fsdpp` and `fsdpp-cuda` do differently: place_host.cpp is in the one, place_cuda.cpp in the other.
// All else of the two programs is the same.
namespace fsdpp::app {

/// True in the program that can compute on GPUs.
[[nodiscard]] bool built_for_gpus() noexcept;

/// GPUs that this process can use; 0 also where there is no driver. Starts no thread that takes signals.
[[nodiscard]] int gpu_count() noexcept;

/// Gives `group` lanes on GPU `gpu` (one rank per GPU, or several with `share_gpus`) and makes the device
/// that runs them; a high-priority stream of it is then current in this thread. Collective; before the model
/// is made. While the group lives, a rank that is lost ends this process with kLostPeer. Throws UsageError as
/// comm::use_cuda_lanes does, and where the program is not built for GPUs.
[[nodiscard]] std::unique_ptr<device::Device> make_gpu_lanes(comm::PeerGroup& group, int gpu,
                                                             bool share_gpus);

/// Bytes taken of the current GPU's memory by everybody, as the driver sees it.
/// Only after make_gpu_lanes().
[[nodiscard]] int64_t gpu_bytes();

}  // namespace fsdpp::app
