#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdpp/base/byte_range.h"

namespace fsdpp::device {

/// The in-order queues of a rank.
enum class LaneKind { compute, gather, reduce };

[[nodiscard]] const char* to_string(LaneKind lane) noexcept;

/// A point in a lane's order. Copies are cheap; a default one counts as already reached.
struct Event {
  LaneKind lane = LaneKind::compute;
  uint64_t position = 0;  // number of operations of the lane before it; 0: none
};

enum class OperationKind {
  run,          // work of a kernel or function
  copy,         // bytes from one place to another
  fill,         // bytes set to a value
  record,       // an event recorded on the lane
  wait,         // the lane waits for an event of another lane
  signal,       // a counter raised for peers
  wait_signal,  // the lane waits for a peer's counter
  acquire,      // memory's life begins
  release,      // memory's life ends
};

[[nodiscard]] const char* to_string(OperationKind kind) noexcept;

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
};

/// Sees every operation in the order of issue, before it runs. Observes only: must not throw or touch the
/// memory.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_operation(const Operation& operation) = 0;
};

}  // namespace fsdpp::device
