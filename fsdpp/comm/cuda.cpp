#include "fsdpp/comm/cuda.h"

#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <utility>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/cuda_lanes.h"
#include "fsdpp/device/cuda.h"
#include "fsdpp/device/cuda_check.h"

namespace fsdpp::comm {
namespace {

// Every rank's GPU, by its number in this process and by its place on the bus: processes may number them
// apart.
struct Gpu {
  int number = 0;
  double bus = 0;  // domain, bus and device in one number
};

Gpu own_gpu(int number) {
  cudaDeviceProp properties = {};
  FSDPP_CUDA(cudaGetDeviceProperties(&properties, number));
  return {number, properties.pciDomainID * 65536.0 + properties.pciBusID * 256.0 + properties.pciDeviceID};
}

// The number that the GPU at `bus` has in this process, or -1 when it is not visible here.
int number_here(double bus) {
  for (int number = 0; number < device::cuda_devices(); ++number) {
    if (own_gpu(number).bus == bus) return number;
  }
  return -1;
}

// Empty when this rank's GPU reaches all others, else why not.
std::string no_access(int gpu, const std::vector<double>& buses) {
  for (std::size_t rank = 0; rank < buses.size(); ++rank) {
    const int other = number_here(buses[rank]);
    if (other == gpu) continue;
    int can = 0;
    if (other >= 0) FSDPP_CUDA(cudaDeviceCanAccessPeer(&can, gpu, other));
    if (can == 0) return text("GPU ", gpu, " cannot address the memory of rank ", rank, "'s GPU");
  }
  return {};
}

// Whether two ranks use one GPU. Throws UsageError when they must not.
bool find_sharers(const std::vector<double>& buses, const CudaLaneOptions& options) {
  for (std::size_t a = 0; a < buses.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      if (buses[a] != buses[b]) continue;
      require(options.share_gpus, "ranks ", b, " and ", a,
              " use one GPU: give each rank a GPU of its own, or let them take turns on it, which is slow "
              "(CudaLaneOptions::share_gpus, fsdpp train --device cuda-shared)");
      require(options.via != CudaVia::nccl, "ranks ", b, " and ", a,
              " share a GPU, which NCCL does not allow: use peers, or give each rank a GPU of its own");
      return true;
    }
  }
  return false;
}

}  // namespace

void use_cuda_lanes(PeerGroup& group, int gpu, CudaLaneOptions options) {
  require(group.ranks() == 1 || group.describe() != "threads",
          "GPU lanes need ranks that are processes: autograd runs all of a process's CUDA backward in one "
          "thread");
  require(gpu >= 0 && gpu < device::cuda_devices(), "there is no GPU ", gpu, ": this process sees ",
          device::cuda_devices(), "; start at most one rank per GPU");
  FSDPP_CUDA(cudaSetDevice(gpu));
  const std::vector<double> buses = group.exchange(std::vector<double>{own_gpu(gpu).bus});
  const bool shared = find_sharers(buses, options);
  const std::string reason = no_access(gpu, buses);
  const std::vector<double> refused = group.exchange(std::vector<double>{reason.empty() ? 0.0 : 1.0});
  bool all = true;
  for (const double value : refused) all = all && value == 0.0;
  require(all || (!shared && options.via != CudaVia::peers),
          shared ? "ranks that share a GPU need peers, but " : "peers were asked for, but ",
          reason.empty() ? "another rank's GPU cannot address all others" : reason,
          shared ? ": give each rank a GPU of its own" : ": use NCCL");
  if (options.via == CudaVia::nccl || !all) {
    group.set_lanes(make_nccl_lanes(group, gpu));
  } else {
    if (shared) setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1", /*overwrite=*/1);
    group.set_lanes(make_cuda_peer_lanes(group, gpu, options.lost_exit_code));
  }
}

}  // namespace fsdpp::comm
