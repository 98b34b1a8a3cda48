#pragma once

#include <deque>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "fsdpp/trace/operation_log.h"
#include "fsdpp/trace/shadow_memory.h"
#include "fsdpp/trace/state_rules.h"

namespace fsdpp::trace {

/// Looks at the operations of all ranks of one address space for what could go wrong on a device whose lanes
/// run by themselves: every hazard of hazard.h, however the operations happened to run this time.
///
/// Happens-before: a lane runs in order; a wait comes after its record, a wait_signal after its signal, a
/// collective after all ranks began it; what the host gives a lane comes after what the host did itself and
/// waited for, not after what it merely gave to other lanes.
///
/// About 1 us an operation: a lookup per piece of memory named, a vector clock only where something new is
/// learnt.
class HazardChecker {
 public:
  explicit HazardChecker(int ranks);

  /// Takes the next operation of `rank`. Between ranks any order will do in which a signal comes before the
  /// waits for it, and all ranks begin a collective before one of them goes on: trace/merge.h makes one.
  void on_operation(int rank, const device::Operation& operation);
  /// The traces are complete: collectives that some rank never called are reported.
  void finish();
  /// A hazard that whoever feeds the checker found, about an operation that was not taken.
  void add(Hazard hazard) {
    ++found_;
    hazards_.push_back(std::move(hazard));
  }

  /// The first of each pair of operations, in order of finding, at most kMost; `found` counts all pairs.
  [[nodiscard]] const std::vector<Hazard>& hazards() const noexcept { return hazards_; }
  [[nodiscard]] uint64_t found() const noexcept { return found_; }
  [[nodiscard]] uint64_t operations() const noexcept { return operations_; }
  [[nodiscard]] int ranks() const noexcept { return ranks_; }
  /// Pieces of memory that are told apart at present.
  [[nodiscard]] std::size_t pieces() const noexcept { return memory_.pieces(); }

  static constexpr std::size_t kMost = 50;

 private:
  using Operation = device::Operation;
  struct Raised {
    uint32_t sequence;
    Stamp stamp;
  };
  // One rank's counter.
  struct Channel {
    std::vector<Raised> raised;  // in order
    Epoch waited;                // of the rank's: a wait for peers to reach what it has not reached itself

    [[nodiscard]] const Raised* find(uint32_t sequence) const;  // the first that is not below; null: none
  };
  // The n-th collective of a group.
  struct Meeting {
    Epoch first;
    device::Collective called;  // by the first
    std::vector<Epoch> members;
    std::vector<Stamp> stamps;
  };

  QueueClock& queue(int thread) { return queues_[static_cast<std::size_t>(thread)]; }
  void step(QueueClock& queue, const Operation& operation);
  void on_record(QueueClock& queue);
  void on_wait(QueueClock& queue, const Operation& operation);
  void on_signal(QueueClock& queue, const Operation& operation);
  void on_wait_signal(QueueClock& queue, const Operation& operation);
  void require_own_counter(const QueueClock& queue, const Operation& operation);
  void on_collective(QueueClock& queue, const Operation& operation);
  void on_rejoin(const QueueClock& queue);
  void on_move(const QueueClock& queue, const Operation& operation);
  void on_memory(const QueueClock& queue, const Operation& operation);
  void report_memory(const ShadowMemory::Finding& finding);
  void report(HazardKind kind, const Epoch& first, const Epoch& second, const std::string& what);
  [[nodiscard]] std::string order_missing(const ShadowMemory::Finding& finding);

  int ranks_;
  uint64_t operations_ = 0;
  uint64_t found_ = 0;
  OperationLog log_;
  std::vector<QueueClock> queues_;
  std::vector<uint64_t> last_work_;                          // per queue: position
  std::vector<std::unordered_map<uint64_t, Stamp>> events_;  // per queue, by position
  std::map<std::pair<int, int>, Channel> channels_;          // by rank and number
  std::map<std::string, std::deque<Meeting>> meetings_;      // by group
  std::map<std::pair<std::string, int>, std::size_t> met_;   // by group and rank: collectives called
  std::vector<StateRules> states_;                           // per rank
  ShadowMemory memory_;
  std::set<std::tuple<HazardKind, int, uint64_t, int, uint64_t>> known_;  // pairs that were reported
  std::vector<Hazard> hazards_;
};

}  // namespace fsdpp::trace
