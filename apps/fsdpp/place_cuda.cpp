#include <pthread.h>
#include <signal.h>

#include <cstdlib>

#include "apps/fsdpp/exit_code.h"
#include "apps/fsdpp/place.h"
#include "fsdpp/comm/cuda.h"
#include "fsdpp/device/cuda.h"
#include "fsdpp/device/cuda_measure.h"

namespace fsdpp::app {
namespace {

/// NVLink multicast is unsafe on a host that others use too: its groups are a resource of the host's fabric,
/// not of this process. Nothing here needs it, so libtorch and NCCL are told to leave it alone unless the
/// user has said otherwise. Ranks that this process starts inherit it.
void leave_multicast_off() noexcept {
  constexpr int kKeepTheUsers = 0;
  setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", kKeepTheUsers);
  setenv("NCCL_NVLS_ENABLE", "0", kKeepTheUsers);
}

}  // namespace

bool built_for_gpus() noexcept { return true; }

int gpu_count() noexcept {
  leave_multicast_off();  // here, since this comes before all else that has to do with GPUs
  // The driver may start threads: they inherit the mask, and leave the signals to those who wait for them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int count = device::cuda_devices();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return count;
}

std::unique_ptr<device::Device> make_gpu_lanes(comm::PeerGroup& group, int gpu, bool share_gpus) {
  comm::use_cuda_lanes(group, gpu, {.lost_exit_code = kLostPeer, .share_gpus = share_gpus});
  device::use_compute_stream(gpu);
  device::use_growing_memory();
  return device::make_cuda_device(gpu);
}

int64_t gpu_bytes() { return device::cuda_memory().taken; }

}  // namespace fsdpp::app
