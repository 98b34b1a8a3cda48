#pragma once

#include <deque>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdpp/trace/hazard_checker.h"

namespace fsdpp::trace {

/// Brings the operations of several ranks into one order: that of arrival, but a wait_signal only after the
/// signal it waits for, and nothing of a rank after a collective before all ranks have begun that.
class Merge {
 public:
  using Sink = std::function<void(int rank, const device::Operation& operation)>;

  Merge(int ranks, Sink sink) : queues_(static_cast<std::size_t>(ranks)), sink_(std::move(sink)) {}

  /// The next operation of `rank`; it and those it lets go on are given to the sink.
  void add(int rank, const device::Operation& operation);

  struct Blocked {
    int rank;
    device::Operation operation;  // what the rank waits in
  };
  /// The ranks that cannot go on: after the last operation, waits for what never came.
  [[nodiscard]] std::vector<Blocked> blocked() const;

 private:
  struct Queue {
    std::deque<device::Operation> held;
    bool in_collective = false;  // the first one held was given to the sink, and waits for the other ranks
  };
  Queue& queue(int rank) { return queues_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] bool ready(const device::Operation& operation) const;
  bool advance(int rank);
  void give(int rank, const device::Operation& operation);
  void drain();

  std::vector<Queue> queues_;
  Sink sink_;
  std::map<std::pair<int, int>, uint32_t> raised_;             // by rank and channel
  std::map<std::pair<std::string, int>, std::size_t> called_;  // by group and rank: collectives begun
  std::map<std::pair<std::string, std::size_t>, int> met_;     // by group and number: ranks that came
};

/// Checks complete traces, one per rank, and returns what is wrong with them.
[[nodiscard]] std::vector<Hazard> check_traces(std::span<const std::vector<device::Operation>> ranks);

/// Reports a rank that waits for ever.
void add_blocked(HazardChecker& checker, const Merge& merge);

}  // namespace fsdpp::trace
