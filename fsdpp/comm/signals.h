#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/comm/backend.h"
#include "fsdpp/comm/lanes.h"

namespace fsdpp::comm {

struct SharedCounter;

/// Counters in peer memory: each rank raises its own, every peer can wait for them.
///
/// A channel counts 1, 2, 3, ... and never skips: a signal out of sequence is a broken invariant, so a lost
/// or doubled one cannot pass unseen. Each (board, channel) is a counter of its own per rank: overlapping
/// groups never share one (symmetric-memory signal pads of c10d do).
///
/// Memory order: what a rank wrote before signal() is visible to a peer after its wait() for that number.
class SignalBoard final : public LaneSignals {
 public:
  /// Collective. `names`: one per channel, for messages, equal on all ranks. Must not outlive `backend`.
  SignalBoard(PeerBackend& backend, std::string group, std::vector<std::string> names,
              std::chrono::milliseconds timeout);
  ~SignalBoard() override;
  SignalBoard(const SignalBoard&) = delete;
  SignalBoard& operator=(const SignalBoard&) = delete;

  /// Raises this rank's `channel` to `sequence`, which must be its value plus one, and wakes waiting peers.
  void signal(int channel, uint32_t sequence) override;

  /// Returns once `rank`'s `channel` has reached `sequence`; at once when it has already.
  /// Throws PeerError that names the rank, group, channel, the number waited for and the number seen: after
  /// the timeout, or as soon as the backend knows that the rank is gone. Throws Interrupted when
  /// interrupted().
  void wait(int rank, int channel, uint32_t sequence) override;

  /// `rank`'s value of `channel` now (acquire order).
  [[nodiscard]] uint32_t value(int rank, int channel) const;
  [[nodiscard]] int channels() const noexcept;

 private:
  [[nodiscard]] SharedCounter& counter(int rank, int channel) const;

  PeerBackend& backend_;
  std::string group_;
  std::vector<std::string> names_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<PeerMemory> memory_;
};

}  // namespace fsdpp::comm
