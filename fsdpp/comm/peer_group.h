#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fsdpp/comm/backend.h"
#include "fsdpp/comm/signals.h"

namespace fsdpp::comm {

/// Ranks that read each other's memory, with what they need to agree: memory, signals, barrier, small
/// exchanges.
///
/// One object per rank. All calls marked collective are made by every rank in the same order.
class PeerGroup {
 public:
  /// Collective. `timeout` bounds every wait for a peer.
  PeerGroup(std::unique_ptr<PeerBackend> backend, std::string name, std::chrono::milliseconds timeout);
  ~PeerGroup();

  [[nodiscard]] int rank() const noexcept;
  [[nodiscard]] int ranks() const noexcept;
  [[nodiscard]] const std::string& name() const noexcept;
  [[nodiscard]] std::chrono::milliseconds timeout() const noexcept;
  [[nodiscard]] std::string describe() const;  // the backend's

  /// Collective; see PeerBackend::allocate.
  [[nodiscard]] std::shared_ptr<PeerMemory> allocate(std::size_t bytes, const std::string& purpose);

  /// Collective: a board of its own with one channel per name. Must not outlive the group.
  [[nodiscard]] std::unique_ptr<SignalBoard> signals(std::vector<std::string> names,
                                                     const std::string& purpose);

  /// Collective: returns when every rank has called it. Throws PeerError naming a missing rank.
  void barrier();

  /// Collective: every rank's `values`, in rank order (ranks() * values.size() doubles). At most kMaxExchange
  /// values per rank, the same number on each (else UsageError).
  [[nodiscard]] std::vector<double> exchange(std::span<const double> values);
  static constexpr std::size_t kMaxExchange = 512;

  /// Collective: the sum over ranks of each value, added in rank order: the same bits on every rank.
  [[nodiscard]] std::vector<double> sum(std::span<const double> values);

 private:
  std::unique_ptr<PeerBackend> backend_;
  std::string name_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<SignalBoard> board_;
  std::shared_ptr<PeerMemory> mailbox_;  // two halves, used in turn
  uint32_t arrivals_ = 0;                // barriers passed
  uint32_t exchanges_ = 0;
};

}  // namespace fsdpp::comm
