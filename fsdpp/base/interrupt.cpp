#include "fsdpp/base/interrupt.h"

#include <atomic>
#include <csignal>

namespace fsdpp {
namespace {

std::atomic<int> signal_number{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may only touch lock-free atomics");

void on_signal(int number) { signal_number.store(number, std::memory_order_relaxed); }

}  // namespace

void catch_interrupts() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = static_cast<int>(SA_RESETHAND);  // a second signal acts as if we were not here
  for (int number : {SIGINT, SIGTERM}) sigaction(number, &action, nullptr);
}

bool interrupted() noexcept { return signal_number.load(std::memory_order_relaxed) != 0; }

int interrupt_signal() noexcept { return signal_number.load(std::memory_order_relaxed); }

void request_interrupt(bool value) noexcept {
  signal_number.store(value ? SIGINT : 0, std::memory_order_relaxed);
}

}  // namespace fsdpp
