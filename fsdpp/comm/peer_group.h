#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdpp/comm/backend.h"
#include "fsdpp/comm/lanes.h"
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
  /// The rank that `rank` of this group has in the group that it is a part of; itself in a whole one.
  [[nodiscard]] int rank_in_whole(int rank) const noexcept;

  /// Collective: a group of some of the ranks, `members` in increasing order, this one among them. Every rank
  /// of this group makes a part with as many members, and each is in one. Parts do everything a group does;
  /// their allocations are collective over the whole group, with equal sizes in all parts. Must not outlive
  /// this group. Throws UsageError for members that are not such.
  [[nodiscard]] std::unique_ptr<PeerGroup> part(const std::vector<int>& members, const std::string& name);
  /// What a part of `whole` sees of memory that all of `whole` has allocated.
  [[nodiscard]] std::shared_ptr<PeerMemory> view(std::shared_ptr<PeerMemory> whole) const;

  [[nodiscard]] const std::string& name() const noexcept;
  [[nodiscard]] std::chrono::milliseconds timeout() const noexcept;
  [[nodiscard]] std::string describe() const;  // the backend's

  /// Collective; see PeerBackend::allocate.
  [[nodiscard]] std::shared_ptr<PeerMemory> allocate(std::size_t bytes, const std::string& purpose);

  /// Collective: a board of its own with one channel per name. Must not outlive the group.
  [[nodiscard]] std::unique_ptr<SignalBoard> signals(std::vector<std::string> names,
                                                     const std::string& purpose);

  /// How the ranks' lanes reach each other: through the same memory as the hosts, unless set_lanes() was
  /// called.
  [[nodiscard]] LaneTransport& lanes() noexcept { return *lanes_; }
  /// Before the first model: lanes of another kind (a GPU's). Every rank sets the same kind.
  void set_lanes(std::unique_ptr<LaneTransport> lanes) { lanes_ = std::move(lanes); }
  /// For others that go on with them: set_lanes() follows at once.
  [[nodiscard]] std::unique_ptr<LaneTransport> take_lanes() { return std::move(lanes_); }

  /// Collective: returns when every rank has called it. Throws PeerError naming a missing rank.
  void barrier();

  /// Collective: every rank's `values`, in rank order (ranks() * values.size() doubles). At most kMaxExchange
  /// values per rank, the same number on each (else UsageError).
  [[nodiscard]] std::vector<double> exchange(std::span<const double> values);
  static constexpr std::size_t kMaxExchange = 512;

  /// Why `rank` does not answer, and giving up on it: see PeerBackend. From any thread.
  [[nodiscard]] std::optional<Trouble> trouble_with(int rank) const { return backend_->trouble_with(rank); }
  void give_up_on(int rank) noexcept { backend_->give_up_on(rank); }

  /// Collective: the sum over ranks of each value, added in rank order: the same bits on every rank.
  [[nodiscard]] std::vector<double> sum(std::span<const double> values);

 private:
  std::unique_ptr<PeerBackend> backend_;
  std::vector<int> members_;  // of a part: ranks in the whole; empty: it is a whole one
  std::string name_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<SignalBoard> board_;
  std::unique_ptr<LaneTransport> lanes_;
  std::shared_ptr<PeerMemory> mailbox_;  // two halves, used in turn
  uint32_t arrivals_ = 0;                // barriers passed
  uint32_t exchanges_ = 0;
};

}  // namespace fsdpp::comm
