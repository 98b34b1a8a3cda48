#include "fsdpp/comm/deadline.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "fsdpp/comm/wait_clock.h"

namespace fsdpp::comm {
namespace {

constexpr std::chrono::seconds kAfterC10d(1);  // which throws by itself where it can

}  // namespace

Deadline::Deadline(PeerGroup& group, std::string what, int exit_code)
    : group_(group), what_(std::move(what)), exit_code_(exit_code), thread_([this] { watch(); }) {}

Deadline::~Deadline() {
  {
    const std::lock_guard lock(mutex_);
    left_ = true;
  }
  over_.notify_one();
  thread_.join();
}

void Deadline::watch() {
  std::unique_lock lock(mutex_);
  WaitClock clock(group_.timeout() + kAfterC10d);
  while (clock.running()) {
    if (over_.wait_for(lock, clock.slice(), [this] { return left_; })) return;
  }
  end();
}

void Deadline::end() {
  if (interrupted()) std::_Exit(128 + interrupt_signal());
  std::string who = "no rank is known to be in trouble";
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    if (rank == group_.rank()) continue;
    const auto trouble = group_.trouble_with(rank);
    if (!trouble) continue;
    who = text("lost rank ", group_.rank_in_whole(rank), ": ", trouble->what);
    group_.give_up_on(rank);
  }
  const std::string message =
      text("fsdpp: ", who, "; rank ", group_.rank_in_whole(group_.rank()), " of group \"", group_.name(),
           "\" did not come back from ", what_, " (timeout ", group_.timeout().count(), " ms)\n");
  std::fputs(message.c_str(), stderr);
  std::fflush(stderr);
  std::_Exit(exit_code_);
}

}  // namespace fsdpp::comm
