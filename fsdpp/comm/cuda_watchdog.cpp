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
    : group_(group),
      channels_(channels),
      exit_code_(exit_code),
      has_left_(std::move(has_left)),
      waits_(kEager + kCaptured) {
  void* pinned = nullptr;
  FSDPP_CUDA(cudaMallocHost(&pinned, waits_.size() * sizeof(uint32_t)));
  words_ = static_cast<uint32_t*>(pinned);
  std::fill_n(words_, waits_.size(), 0U);
  thread_ = std::thread([this] { watch(); });
}

CudaWatchdog::~CudaWatchdog() {
  stop_.store(true);
  thread_.join();
  static_cast<void>(cudaFreeHost(words_));
}

uint32_t* CudaWatchdog::expect(int rank, int channel, bool captured) {
  const std::lock_guard lock(mutex_);
  if (captured && captured_ == kCaptured) {
    if (!std::exchange(said_, true))
      std::fprintf(
          stderr,
          "fsdpp: graphs have captured %zu waits for other ranks, and further ones are not watched: there a "
          "lost rank is waited for without end; capture fewer graphs\n",
          kCaptured);
    return nullptr;
  }
  const std::size_t index = captured ? kEager + captured_++ : eager_++ % kEager;
  waits_[index] = {rank, channel};
  return words_ + index;
}

void CudaWatchdog::watch() {
  while (!stop_.load()) {
    std::this_thread::sleep_for(kLook);
    const std::lock_guard lock(mutex_);
    for (std::size_t index = 0; index < std::min(eager_, kEager); ++index) look(index);
    for (std::size_t index = 0; index < captured_; ++index) look(kEager + index);
  }
}

// A look counts as kLook however long it took to come: while this process is stopped no time passes.
void CudaWatchdog::look(std::size_t index) {
  Wait& wait = waits_[index];
  const uint32_t number = std::atomic_ref(words_[index]).load(std::memory_order_relaxed);
  const bool stands = number != 0 && number == wait.last;
  wait.since = stands ? wait.since + kLook.count() : 0;
  wait.last = number;
  if (!stands) return;
  const auto trouble = group_.trouble_with(wait.rank);
  if (trouble && trouble->final) end(wait, trouble->what);
  if (interrupted() && has_left_(wait.rank)) end(wait, "it has left");
  if (wait.since >= group_.timeout().count())
    end(wait, trouble ? trouble->what : "it runs but did not come in time");
}

void CudaWatchdog::end(const Wait& wait, const std::string& why) {
  // The user has stopped the job, and that rank heard it a moment earlier: nobody is lost.
  if (interrupted()) std::_Exit(128 + interrupt_signal());
  const int named = group_.rank_in_whole(wait.rank);
  const std::string message = text(
      "fsdpp: lost rank ", named, ": ", why, "; rank ", group_.rank_in_whole(group_.rank()), " of group \"",
      group_.name(), "\" waited on its GPU for rank ", named, " to reach ", wait.last, " on channel \"",
      channels_[static_cast<std::size_t>(wait.channel)], "\" (timeout ", group_.timeout().count(), " ms)\n");
  std::fputs(message.c_str(), stderr);
  std::fflush(stderr);
  group_.give_up_on(wait.rank);
  std::_Exit(exit_code_);
}

}  // namespace fsdpp::comm
