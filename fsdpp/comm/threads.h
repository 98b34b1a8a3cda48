#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "fsdpp/comm/backend.h"

namespace fsdpp::comm {

/// Where the thread ranks of one group meet: what notes and /proc are to processes. Thread safe.
class ThreadMeeting {
 public:
  explicit ThreadMeeting(int ranks);  // throws UsageError unless ranks > 0

  [[nodiscard]] int ranks() const noexcept { return static_cast<int>(ended_.size()); }

  /// Says that `rank` will not take part any more; `how` completes "its thread ..." ("has returned").
  void end(int rank, const std::string& how);
  [[nodiscard]] std::optional<Trouble> trouble_with(int rank) const;

  /// Collective number `round` of `rank` (from 0), see PeerBackend::allocate.
  [[nodiscard]] std::shared_ptr<PeerMemory> allocate(int rank, uint64_t round, std::size_t bytes,
                                                     const std::string& purpose,
                                                     std::chrono::milliseconds timeout);

 private:
  struct Round;
  void complete(Round& round) const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::optional<std::string>> ended_;  // per rank
  std::map<uint64_t, std::shared_ptr<Round>> rounds_;
};

/// Ranks that are threads of one process: peers' memory is reached through plain pointers.
class ThreadBackend final : public PeerBackend {
 public:
  /// Throws UsageError unless 0 <= rank < meeting->ranks().
  ThreadBackend(std::shared_ptr<ThreadMeeting> meeting, int rank);

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int ranks() const noexcept override { return meeting_->ranks(); }
  [[nodiscard]] std::string describe() const override { return "threads"; }
  [[nodiscard]] std::shared_ptr<PeerMemory> allocate(std::size_t bytes, const std::string& purpose,
                                                     std::chrono::milliseconds timeout) override;
  [[nodiscard]] std::optional<Trouble> trouble_with(int rank) const override {
    return meeting_->trouble_with(rank);
  }
  void give_up_on(int) noexcept override {}

 private:
  std::shared_ptr<ThreadMeeting> meeting_;
  int rank_;
  uint64_t round_ = 0;
};

}  // namespace fsdpp::comm
