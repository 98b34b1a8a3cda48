#include "fsdpp/comm/cuda_watchdog.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"

namespace fsdpp::comm {
namespace {

constexpr std::chrono::milliseconds kLook(100);

}  // namespace

CudaWatchdog::CudaWatchdog(PeerGroup& group, int gpu, const std::vector<std::string>& channels,
                           const uint32_t* pad, int exit_code)
    : group_(group),
      gpu_(gpu),
      channels_(channels),
      pad_(pad),
      exit_code_(exit_code),
      expected_(channels.size() * static_cast<std::size_t>(group.ranks())),
      last_(expected_.size()),
      since_(expected_.size()),
      thread_([this] { watch(); }) {}

CudaWatchdog::~CudaWatchdog() {
  stop_.store(true);
  thread_.join();
}

// Errors of the device are not its business: whoever uses the lanes meets them.
void CudaWatchdog::watch() {
  cudaStream_t stream = nullptr;
  void* pinned = nullptr;
  const std::size_t bytes = expected_.size() * sizeof(uint32_t);
  if (cudaSetDevice(gpu_) != cudaSuccess ||
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess ||
      cudaMallocHost(&pinned, bytes) != cudaSuccess) {
    return;
  }
  while (!stop_.load()) {
    std::this_thread::sleep_for(kLook);
    if (cudaMemcpyAsync(pinned, pad_, bytes, cudaMemcpyDeviceToHost, stream) != cudaSuccess ||
        cudaStreamSynchronize(stream) != cudaSuccess) {
      break;
    }
    look(static_cast<const uint32_t*>(pinned));
  }
  static_cast<void>(cudaFreeHost(pinned));
  static_cast<void>(cudaStreamDestroy(stream));
}

// A look counts as kLook however long it took to come: while this process is stopped no time passes.
void CudaWatchdog::look(const uint32_t* now) {
  for (std::size_t i = 0; i < expected_.size(); ++i) {
    const uint32_t expected = expected_[i].load(std::memory_order_relaxed);
    const bool here = static_cast<int32_t>(now[i] - expected) >= 0;
    since_[i] = !here && expected == last_[i] ? since_[i] + kLook.count() : 0;
    last_[i] = expected;
    if (since_[i] == 0) continue;
    const int rank = static_cast<int>(i / channels_.size());
    const std::size_t channel = i % channels_.size();
    const auto trouble = group_.trouble_with(rank);
    if (trouble && trouble->final) end(rank, channel, expected, now[i], trouble->what);
    if (since_[i] >= group_.timeout().count())
      end(rank, channel, expected, now[i], trouble ? trouble->what : "it runs but did not come in time");
  }
}

void CudaWatchdog::end(int rank, std::size_t channel, uint32_t expected, uint32_t seen,
                       const std::string& why) {
  // The user has stopped the job, and that rank heard it a moment earlier: nobody is lost.
  if (interrupted()) std::_Exit(128 + interrupt_signal());
  const std::string message =
      text("fsdpp: lost rank ", rank, ": ", why, "; rank ", group_.rank(), " of group \"", group_.name(),
           "\" waited on its GPU for rank ", rank, " to reach ", expected, " on channel \"",
           channels_[channel], "\" (seen ", seen, ", timeout ", group_.timeout().count(), " ms)\n");
  std::fputs(message.c_str(), stderr);
  std::fflush(stderr);
  group_.give_up_on(rank);
  std::_Exit(exit_code_);
}

}  // namespace fsdpp::comm
