#include "apps/fsdpp/place.h"
#include "fsdpp/base/error.h"

namespace fsdpp::app {

bool built_for_gpus() noexcept { return false; }

int gpu_count() noexcept { return 0; }

std::unique_ptr<device::Device> make_gpu_lanes(comm::PeerGroup& /*group*/, int gpu, bool /*share_gpus*/) {
  throw UsageError(text("GPU ", gpu, ": this program computes on CPUs alone; use fsdpp-cuda"));
}

int64_t gpu_bytes() { throw UsageError("no GPU: this program computes on CPUs alone; use fsdpp-cuda"); }

}  // namespace fsdpp::app
