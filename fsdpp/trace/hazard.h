#pragma once

#include <cstdint>
#include <string>

#include "fsdpp/trace/vector_clock.h"

namespace fsdpp::trace {

enum class HazardKind {
  unordered,          // two accesses to the same bytes, one writes, nothing orders them
  host_early,         // likewise, and one of them is the host's: it did not wait for the event
  early_reuse,        // memory's life begins before the last use of the life before has ended
  early_release,      // memory's life ends, or it goes back to the system, before its last use has ended
  use_after_release,  // an access to memory between its lives
  unwritten_read,     // a life's memory is read before anything was written
  life,               // a life begins inside another, ends twice, or ends in part
  not_rejoined,       // a lane's work is not behind another lane's, where it has to be
  collective,         // ranks call different collectives, or not all of them
  state,              // a unit or slot made a move that is not allowed
  signal,             // a counter is raised out of order, or waited for too early or for ever
  event,              // a wait for an event that was never recorded
};

[[nodiscard]] const char* to_string(HazardKind kind) noexcept;

/// One broken rule. `first` and `second` are the two operations in order of issue; a rule about one operation
/// has it as `second`.
struct Hazard {
  HazardKind kind;
  Epoch first;
  Epoch second;
  std::string text;  // names both operations, their lanes, ranks and bytes, and the edge that is missing
};

}  // namespace fsdpp::trace
