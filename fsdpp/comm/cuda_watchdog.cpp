#include "fsdpp/comm/cuda_watchdog.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "fsdpp/base/error.h"

namespace fsdpp::comm {
namespace {

constexpr std::chrono::milliseconds kLook(50);

}  // namespace

CudaWatchdog::CudaWatchdog(PeerGroup& group, const std::vector<std::string>& channels,
                           const uint32_t* waiting, int exit_code)
    : group_(group),
      channels_(channels),
      waiting_(waiting),
      exit_code_(exit_code),
      seen_(channels.size() * static_cast<std::size_t>(group.ranks())),
      since_(seen_.size()),
      thread_([this] { watch(); }) {}

CudaWatchdog::~CudaWatchdog() {
  stop_.store(true);
  thread_.join();
}

void CudaWatchdog::watch() {
  while (!stop_.load()) {
    std::this_thread::sleep_for(kLook);
    look();
  }
}

// A look counts as kLook however long it took to come: while this process is stopped no time passes.
void CudaWatchdog::look() {
  const auto ranks = static_cast<std::size_t>(group_.ranks());
  for (std::size_t i = 0; i < seen_.size(); ++i) {
    const uint32_t now = __atomic_load_n(waiting_ + i, __ATOMIC_ACQUIRE);
    since_[i] = now != 0 && now == seen_[i] ? since_[i] + kLook.count() : 0;
    seen_[i] = now;
    if (now == 0 || since_[i] == 0) continue;
    const int rank = static_cast<int>(i % ranks);
    const auto trouble = group_.trouble_with(rank);
    if (trouble && trouble->final) end(rank, i / ranks, now, trouble->what);
    if (since_[i] >= group_.timeout().count())
      end(rank, i / ranks, now, trouble ? trouble->what : "it runs but did not come in time");
  }
}

void CudaWatchdog::end(int rank, std::size_t channel, uint32_t expected, const std::string& why) {
  const std::string message =
      text("fsdpp: lost rank ", rank, ": ", why, "; rank ", group_.rank(), " of group \"", group_.name(),
           "\" waited on its GPU for rank ", rank, " to reach ", expected, " on channel \"",
           channels_[channel], "\" (timeout ", group_.timeout().count(), " ms)\n");
  std::fputs(message.c_str(), stderr);
  std::fflush(stderr);
  group_.give_up_on(rank);
  std::_Exit(exit_code_);
}

}  // namespace fsdpp::comm
