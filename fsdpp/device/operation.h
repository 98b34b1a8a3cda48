#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/base/byte_range.h"

namespace fsdpp::device {

/// The in-order queues of a rank; `host` is its thread itself: what runs there has ended when the verb
/// returns, and a wait there blocks. Whatever the thread gives a lane later comes after it.
enum class LaneKind { compute, gather, reduce, host };
inline constexpr int kLaneKinds = 4;

[[nodiscard]] const char* to_string(LaneKind lane) noexcept;

/// A point in a lane's order. Copies are cheap; a default one counts as already reached.
struct Event {
  LaneKind lane = LaneKind::compute;
  uint64_t position = 0;  // number of operations of the lane before it; 0: none
};

enum class OperationKind {
  run,          // work of a kernel or function
  copy,         // bytes from each range read to the range written of the same index
  fill,         // bytes set to a value
  record,       // an event recorded on the lane
  wait,         // the lane waits for an event of another lane
  signal,       // a counter raised for peers
  wait_signal,  // the lane waits for a peer's counter
  acquire,      // memory's life begins
  release,      // memory's life ends
  free,         // memory goes back to an allocator: its next owner knows nothing of this one
  collective,   // all ranks of a group take part
  rejoin,       // the lane must be behind everything that the rank's other lanes were given
  move,         // a unit or a slot changes its state
};

[[nodiscard]] const char* to_string(OperationKind kind) noexcept;

/// What every rank of a group calls alike.
struct Collective {
  std::string group;
  int ranks = 0;      // members of the group
  std::string kind;   // "all_gather"
  int64_t count = 0;  // elements
  std::string dtype;  // "float"
};

/// Where a unit's weights stand (released, gathering, resident), or a gradient slot (closed, open, reducing).
enum class State : uint8_t { released, gathering, resident, closed, open, reducing };

[[nodiscard]] const char* to_string(State state) noexcept;

/// One asynchronous operation as it is announced: where it runs, what it touches, what it waits for.
struct Operation {
  OperationKind kind = OperationKind::run;
  LaneKind lane = LaneKind::compute;
  uint64_t position = 0;  // in its lane, from 1
  std::string name;       // "gather layers.3", for people
  std::vector<ByteRange> reads;
  std::vector<ByteRange> writes;
  Event event;            // record: the event made; wait: the event waited for
  int peer = -1;          // wait_signal: the rank waited for
  int channel = -1;       // signal, wait_signal
  uint32_t sequence = 0;  // signal, wait_signal
  std::shared_ptr<const Collective> collective;
  State from{};  // move
  State to{};    // move
};

/// Sees every operation in the order of issue, before it runs. Observes only: must not throw or touch the
/// memory.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_operation(const Operation& operation) = 0;
};

}  // namespace fsdpp::device
