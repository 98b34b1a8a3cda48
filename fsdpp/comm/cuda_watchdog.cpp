#include "fsdpp/comm/cuda_watchdog.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "fsdpp/device/cuda_check.h"

namespace fsdpp::comm {
namespace {

constexpr std::chrono::milliseconds kLook(100);

}  // namespace

CudaWatchdog::CudaWatchdog(PeerGroup& group, const std::vector<std::string>& channels, int exit_code,
                           std::function<bool(int rank)> has_left)
    : group_(group), channels_(channels), exit_code_(exit_code), has_left_(std::move(has_left)) {
  void* pinned = nullptr;
  FSDPP_CUDA(cudaMallocHost(&pinned, 2 * kMostLanes * sizeof(uint32_t)));
  shown_ = static_cast<uint32_t*>(pinned);
  std::fill_n(shown_, 2 * kMostLanes, 0U);
  thread_ = std::thread([this] { watch(); });
}

CudaWatchdog::~CudaWatchdog() {
  stop_.store(true);
  thread_.join();
  static_cast<void>(cudaFreeHost(shown_));
}

CudaWatchdog::Ticket CudaWatchdog::expect(device::Stream stream, int rank, int channel, uint32_t sequence) {
  const std::lock_guard lock(mutex_);
  std::size_t index = 0;
  while (index < lane_count_ && lanes_[index].stream != stream) ++index;
  FSDPP_INVARIANT(index < kMostLanes, "more than ", kMostLanes, " streams wait for peers");
  Lane& lane = lanes_[index];
  if (index == lane_count_) {
    lane.stream = stream;
    lane.waits.resize(kKept);
    ++lane_count_;
  }
  const uint32_t number = ++lane.issued;
  lane.waits[number % kKept] = {rank, channel, sequence};
  return {marks(index), number};
}

void CudaWatchdog::watch() {
  while (!stop_.load()) {
    std::this_thread::sleep_for(kLook);
    const std::lock_guard lock(mutex_);
    for (std::size_t index = 0; index < lane_count_; ++index) look(index, lanes_[index]);
  }
}

// A look counts as kLook however long it took to come: while this process is stopped no time passes.
void CudaWatchdog::look(std::size_t index, Lane& lane) {
  const uint32_t ended = std::atomic_ref(*marks(index).ended).load(std::memory_order_acquire);
  const uint32_t begun = std::atomic_ref(*marks(index).begun).load(std::memory_order_acquire);
  const bool stands = begun != ended && begun == lane.last;
  lane.since = stands ? lane.since + kLook.count() : 0;
  lane.last = begun;
  if (!stands) return;
  const Wait& wait = lane.waits[begun % kKept];
  const auto trouble = group_.trouble_with(wait.rank);
  if (trouble && trouble->final) end(wait, trouble->what);
  if (interrupted() && has_left_(wait.rank)) end(wait, "it has left");
  if (lane.since >= group_.timeout().count())
    end(wait, trouble ? trouble->what : "it runs but did not come in time");
}

void CudaWatchdog::end(const Wait& wait, const std::string& why) {
  // The user has stopped the job, and that rank heard it a moment earlier: nobody is lost.
  if (interrupted()) std::_Exit(128 + interrupt_signal());
  const int named = group_.rank_in_whole(wait.rank);
  const std::string message = text(
      "fsdpp: lost rank ", named, ": ", why, "; rank ", group_.rank_in_whole(group_.rank()), " of group \"",
      group_.name(), "\" waited on its GPU for rank ", named, " to reach ", wait.sequence, " on channel \"",
      channels_[static_cast<std::size_t>(wait.channel)], "\" (timeout ", group_.timeout().count(), " ms)\n");
  std::fputs(message.c_str(), stderr);
  std::fflush(stderr);
  group_.give_up_on(wait.rank);
  std::_Exit(exit_code_);
}

}  // namespace fsdpp::comm
