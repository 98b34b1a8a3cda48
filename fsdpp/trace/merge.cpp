#include "fsdpp/trace/merge.h"

#include "fsdpp/base/error.h"
#include "fsdpp/trace/recorder.h"

namespace fsdpp::trace {

using device::Operation;
using device::OperationKind;

bool Merge::ready(const Operation& operation) const {
  if (operation.kind != OperationKind::wait_signal) return true;
  const auto raised = raised_.find({operation.peer, operation.channel});
  return raised != raised_.end() && raised->second >= operation.sequence;
}

void Merge::give(int rank, const Operation& operation) {
  if (operation.kind == OperationKind::signal) {
    uint32_t& raised = raised_[{rank, operation.channel}];
    raised = std::max(raised, operation.sequence);
  }
  sink_(rank, operation);
}

void Merge::add(int rank, const Operation& operation) {
  Queue& own = queue(rank);
  if (own.held.empty() && operation.kind != OperationKind::collective && ready(operation)) {
    give(rank, operation);
    if (operation.kind == OperationKind::signal) drain();
    return;
  }
  own.held.push_back(operation);
  drain();
}

// Gives the first operation held of `rank` to the sink, if it may go on.
bool Merge::advance(int rank) {
  Queue& own = queue(rank);
  if (own.held.empty()) return false;
  const Operation& first = own.held.front();
  if (first.kind == OperationKind::collective) {
    const std::string& group = first.collective->group;
    if (!own.in_collective) {
      own.in_collective = true;
      ++met_[{group, called_[{group, rank}]++}];
      give(rank, first);
      return true;
    }
    if (met_[{group, called_[{group, rank}] - 1}] < first.collective->ranks) return false;
    own.in_collective = false;
  } else {
    if (!ready(first)) return false;
    give(rank, first);
  }
  own.held.pop_front();
  return true;
}

void Merge::drain() {
  for (bool moved = true; moved;) {
    moved = false;
    for (int rank = 0; rank < static_cast<int>(queues_.size()); ++rank) {
      while (advance(rank)) moved = true;
    }
  }
}

std::vector<Merge::Blocked> Merge::blocked() const {
  std::vector<Blocked> result;
  for (std::size_t rank = 0; rank < queues_.size(); ++rank) {
    if (!queues_[rank].held.empty()) result.push_back({static_cast<int>(rank), queues_[rank].held.front()});
  }
  return result;
}

void add_blocked(HazardChecker& checker, const Merge& merge) {
  for (const Merge::Blocked& blocked : merge.blocked()) {
    if (blocked.operation.kind == OperationKind::collective) continue;  // the checker knows who did not come
    checker.add({HazardKind::signal,
                 {},
                 {thread_of(blocked.rank, blocked.operation.lane), blocked.operation.position},
                 text(to_string(HazardKind::signal), ": ", describe(blocked.operation), " of rank ",
                      blocked.rank, " waits for a signal that nothing raises, or that comes after it")});
  }
}

std::vector<Hazard> check_traces(std::span<const std::vector<Operation>> ranks) {
  HazardChecker checker(static_cast<int>(ranks.size()));
  Merge merge(checker.ranks(),
              [&](int rank, const Operation& operation) { checker.on_operation(rank, operation); });
  for (int rank = 0; rank < checker.ranks(); ++rank) {
    for (const Operation& operation : ranks[static_cast<std::size_t>(rank)]) merge.add(rank, operation);
  }
  add_blocked(checker, merge);
  checker.finish();
  return checker.hazards();
}

}  // namespace fsdpp::trace
