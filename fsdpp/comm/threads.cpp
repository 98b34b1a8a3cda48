#include "fsdpp/comm/threads.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>

#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/comm/host_memory.h"
#include "fsdpp/comm/wait_clock.h"

namespace fsdpp::comm {
namespace {

/// One mapping with a part for every rank and a page without access between them.
class ThreadRegion final {
 public:
  ThreadRegion(std::size_t bytes, int ranks, const std::string& purpose)
      : part_(whole_pages(bytes)), guard_(whole_pages(1)), ranks_(static_cast<std::size_t>(ranks)) {
    check_memory(part_ + guard_, ranks, purpose, available_memory());
    void* const start = mmap(nullptr, size(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) refuse(purpose);
    start_ = static_cast<std::byte*>(start);
    for (int rank = 0; rank < ranks; ++rank) {
      if (mprotect(part(rank), part_, PROT_READ | PROT_WRITE) == 0) continue;
      munmap(start_, size());
      refuse(purpose);
    }
  }
  ~ThreadRegion() { munmap(start_, size()); }
  ThreadRegion(const ThreadRegion&) = delete;
  ThreadRegion& operator=(const ThreadRegion&) = delete;

  [[nodiscard]] std::byte* part(int rank) const {
    return start_ + static_cast<std::size_t>(rank) * (part_ + guard_);
  }

 private:
  [[nodiscard]] std::size_t size() const { return ranks_ * (part_ + guard_); }
  [[noreturn]] void refuse(const std::string& purpose) const {
    throw EnvironmentError(
        text("cannot map ", size(), " bytes for ", purpose, ": ", std::strerror(errno),
             "; use a smaller model or batch, or raise the process's memory limit (ulimit -v)"));
  }

  std::size_t part_;
  std::size_t guard_;
  std::size_t ranks_;
  std::byte* start_ = nullptr;
};

class ThreadMemory final : public PeerMemory {
 public:
  ThreadMemory(std::size_t bytes, const std::shared_ptr<ThreadRegion>& region, int ranks)
      : PeerMemory(bytes, parts(*region, ranks)), region_(region) {}

 private:
  static std::vector<std::byte*> parts(const ThreadRegion& region, int ranks) {
    std::vector<std::byte*> bases;
    for (int rank = 0; rank < ranks; ++rank) bases.push_back(region.part(rank));
    return bases;
  }
  std::shared_ptr<ThreadRegion> region_;
};

}  // namespace

/// One collective allocation: what each rank asked for, then what all of them get.
struct ThreadMeeting::Round {
  struct Ask {
    std::size_t bytes;
    std::string purpose;
  };
  std::vector<std::optional<Ask>> asks;  // per rank
  std::shared_ptr<ThreadRegion> region;  // set, or one of the errors, once every rank has asked
  std::string usage_error;               // texts: each rank throws an exception of its own
  std::string environment_error;

  [[nodiscard]] bool complete() const { return region || !usage_error.empty() || !environment_error.empty(); }
  [[nodiscard]] std::shared_ptr<ThreadRegion> result() const {
    if (!usage_error.empty()) throw UsageError(usage_error);
    if (!environment_error.empty()) throw EnvironmentError(environment_error);
    return region;
  }
};

ThreadMeeting::ThreadMeeting(int ranks) {
  require(ranks > 0, "a group of ", ranks, " ranks was asked for, expected at least 1");
  ended_.resize(static_cast<std::size_t>(ranks));
}

void ThreadMeeting::end(int rank, const std::string& how) {
  const std::lock_guard lock(mutex_);
  ended_.at(static_cast<std::size_t>(rank)) = how;
  changed_.notify_all();
}

std::optional<Trouble> ThreadMeeting::trouble_with(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto& how = ended_.at(static_cast<std::size_t>(rank));
  if (!how) return std::nullopt;
  return Trouble{"its thread " + *how, true};
}

void ThreadMeeting::complete(Round& round) const {
  try {
    const Round::Ask& first = *round.asks.front();
    for (std::size_t rank = 1; rank < round.asks.size(); ++rank) {
      const Round::Ask& other = *round.asks[rank];
      require(other.bytes == first.bytes,
              "ranks ask for different sizes in one collective allocation: rank 0 ", first.bytes,
              " bytes for ", first.purpose, ", rank ", rank, " ", other.bytes, " bytes for ", other.purpose);
    }
    round.region = std::make_shared<ThreadRegion>(first.bytes, ranks(), first.purpose);
  } catch (const UsageError& error) {
    round.usage_error = error.what();
  } catch (const std::exception& error) {
    round.environment_error = error.what();
  }
}

std::shared_ptr<PeerMemory> ThreadMeeting::allocate(int rank, uint64_t number, std::size_t bytes,
                                                    const std::string& purpose,
                                                    std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  std::shared_ptr<Round>& slot = rounds_[number];
  if (!slot)
    slot = std::make_shared<Round>(Round{std::vector<std::optional<Round::Ask>>(ended_.size()), {}, {}, {}});
  const std::shared_ptr<Round> round = slot;
  round->asks[static_cast<std::size_t>(rank)] = Round::Ask{bytes, purpose};
  const auto asked = [](const std::optional<Round::Ask>& ask) { return ask.has_value(); };
  if (std::all_of(round->asks.begin(), round->asks.end(), asked)) {
    complete(*round);
    rounds_.erase(number);
    changed_.notify_all();
  }
  WaitClock clock(timeout);
  while (!round->complete()) {
    if (interrupted()) throw Interrupted("asked to stop while waiting for peers to allocate " + purpose);
    const bool time_left = clock.running();
    for (std::size_t peer = 0; peer < ended_.size(); ++peer) {
      if (round->asks[peer] || (time_left && !ended_[peer])) continue;
      throw PeerError(
          text("lost rank ", peer, ": ",
               ended_[peer] ? "its thread " + *ended_[peer] : std::string("it did not come in time"),
               "; rank ", rank, " waited for it to allocate ", bytes, " bytes for ", purpose, " (allocation ",
               number, ", timeout ", timeout.count(), " ms)"),
          static_cast<int>(peer), "threads", number);
    }
    changed_.wait_for(lock, clock.slice());
  }
  return std::make_shared<ThreadMemory>(bytes, round->result(), ranks());
}

ThreadBackend::ThreadBackend(std::shared_ptr<ThreadMeeting> meeting, int rank)
    : meeting_(std::move(meeting)), rank_(rank) {
  require(rank >= 0 && rank < meeting_->ranks(), "rank ", rank, " is not in a group of ", meeting_->ranks());
}

std::shared_ptr<PeerMemory> ThreadBackend::allocate(std::size_t bytes, const std::string& purpose,
                                                    std::chrono::milliseconds timeout) {
  return meeting_->allocate(rank_, round_++, bytes, purpose, timeout);
}

namespace {

/// What the ranks of run_thread_ranks threw, in order of time.
class Failures {
 public:
  void add(std::exception_ptr error, bool consequence) {
    const std::lock_guard lock(mutex_);
    std::exception_ptr& first = consequence ? consequence_ : cause_;
    if (!first) first = std::move(error);
  }
  void rethrow() const {  // once every rank has ended
    if (cause_) std::rethrow_exception(cause_);
    if (consequence_) std::rethrow_exception(consequence_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr cause_;
  std::exception_ptr consequence_;  // a PeerError: most often another rank's failure, seen from here
};

void run_rank(const std::shared_ptr<ThreadMeeting>& meeting, int rank, std::chrono::milliseconds timeout,
              const std::function<void(PeerGroup&)>& body, Failures& failures) {
  std::string how = "has returned";
  try {
    PeerGroup group(std::make_unique<ThreadBackend>(meeting, rank), "threads", timeout);
    body(group);
  } catch (const PeerError& error) {
    failures.add(std::current_exception(), true);
    how = text("has failed: ", error.what());
  } catch (const std::exception& error) {
    failures.add(std::current_exception(), false);
    how = text("has failed: ", error.what());
  } catch (...) {
    failures.add(std::current_exception(), false);
    how = "has failed with an exception of unknown type";
  }
  meeting->end(rank, how);
}

}  // namespace

void run_thread_ranks(int ranks, const std::function<void(PeerGroup&)>& body,
                      std::chrono::milliseconds timeout) {
  const auto meeting = std::make_shared<ThreadMeeting>(ranks);
  Failures failures;
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    try {
      threads.emplace_back([&, rank] { run_rank(meeting, rank, timeout, body, failures); });
    } catch (const std::system_error& error) {
      failures.add(std::make_exception_ptr(EnvironmentError(
                       text("cannot start a thread for rank ", rank, " of ", ranks, ": ", error.what()))),
                   false);
      meeting->end(rank, "could not be started");
    }
  }
  for (std::thread& thread : threads) thread.join();
  failures.rethrow();
}

}  // namespace fsdpp::comm
