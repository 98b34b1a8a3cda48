#include "fsdpp/comm/shared_counter.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <ctime>

#include "fsdpp/base/interrupt.h"
#include "fsdpp/comm/wait_clock.h"

namespace fsdpp::comm {
namespace {

// Yields before sleeping: a peer that is a few microseconds behind is met without a system call on its side,
// and with more ranks than cores each yield lets one of them run.
constexpr int kYields = 32;

using Word = std::atomic_ref<uint32_t>;
static_assert(Word::is_always_lock_free, "a counter shared between processes cannot be behind a lock");

bool reached(uint32_t seen, uint32_t value) { return static_cast<int32_t>(seen - value) >= 0; }

// Shared futexes, without FUTEX_PRIVATE_FLAG: the word lies at another address in each process
// (std::atomic::wait uses private ones, which never wake another process).
void sleep_while(uint32_t& word, uint32_t value, std::chrono::nanoseconds most) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(most);
  const timespec time{static_cast<time_t>(seconds.count()), static_cast<long>((most - seconds).count())};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}

void wake_all(uint32_t& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// Announces a sleeper for as long as it lives. Sequentially consistent on both sides: of "waiter counted,
// then value read" and "value raised, then waiters read" at least one sees the other, so no wake is lost.
class CountedWaiter {
 public:
  explicit CountedWaiter(uint32_t& waiters) : waiters_(waiters) {
    waiters_.fetch_add(1, std::memory_order_seq_cst);
  }
  ~CountedWaiter() { waiters_.fetch_sub(1, std::memory_order_relaxed); }
  CountedWaiter(const CountedWaiter&) = delete;
  CountedWaiter& operator=(const CountedWaiter&) = delete;

 private:
  Word waiters_;
};

WaitOutcome wait_asleep(SharedCounter& counter, uint32_t value, std::chrono::milliseconds timeout,
                        const std::function<std::optional<Trouble>()>& trouble) {
  const Word word(counter.value);
  const CountedWaiter counted(counter.waiters);
  WaitClock clock(timeout);
  // Kept while the peer seems alive again: one that another rank has just ended does, until it is taken down.
  std::optional<Trouble> latest;
  while (true) {
    const uint32_t seen = word.load(std::memory_order_seq_cst);
    if (reached(seen, value)) return {WaitResult::reached, seen, std::nullopt};
    if (interrupted()) return {WaitResult::interrupted, seen, std::nullopt};
    const bool time_left = clock.running();
    sleep_while(counter.value, seen, clock.slice());
    if (word.load(std::memory_order_relaxed) != seen) continue;
    const std::optional<Trouble> now = trouble();
    if (now) latest = now;
    // Looked at again: a rank that raised its counter and then ended has done its part.
    const uint32_t last = word.load(std::memory_order_acquire);
    if (reached(last, value)) return {WaitResult::reached, last, std::nullopt};
    // A peer that is gone may have heard a moment earlier what this rank has heard by now.
    if (now && now->final && interrupted()) return {WaitResult::interrupted, last, std::nullopt};
    if (now && now->final) return {WaitResult::peer_lost, last, now};
    if (!time_left) return {WaitResult::timed_out, last, latest};
  }
}

}  // namespace

void raise(SharedCounter& counter, uint32_t value) {
  Word(counter.value).store(value, std::memory_order_seq_cst);
  if (Word(counter.waiters).load(std::memory_order_seq_cst) != 0) wake_all(counter.value);
}

uint32_t value_of(SharedCounter& counter) { return Word(counter.value).load(std::memory_order_acquire); }

WaitOutcome wait_for(SharedCounter& counter, uint32_t value, std::chrono::milliseconds timeout,
                     const std::function<std::optional<Trouble>()>& trouble) {
  for (int i = 0; i <= kYields; ++i) {
    const uint32_t seen = value_of(counter);
    if (reached(seen, value)) return {WaitResult::reached, seen, std::nullopt};
    sched_yield();
  }
  return wait_asleep(counter, value, timeout, trouble);
}

}  // namespace fsdpp::comm
