#include "fsdpp/device/operation.h"

namespace fsdpp::device {

const char* to_string(LaneKind lane) noexcept {
  switch (lane) {
    case LaneKind::compute:
      return "compute";
    case LaneKind::gather:
      return "gather";
    case LaneKind::reduce:
      return "reduce";
    case LaneKind::host:
      return "host";
  }
  return "?";
}

const char* to_string(OperationKind kind) noexcept {
  switch (kind) {
    case OperationKind::run:
      return "run";
    case OperationKind::copy:
      return "copy";
    case OperationKind::fill:
      return "fill";
    case OperationKind::record:
      return "record";
    case OperationKind::wait:
      return "wait";
    case OperationKind::signal:
      return "signal";
    case OperationKind::wait_signal:
      return "wait_signal";
    case OperationKind::acquire:
      return "acquire";
    case OperationKind::release:
      return "release";
    case OperationKind::free:
      return "free";
    case OperationKind::collective:
      return "collective";
    case OperationKind::rejoin:
      return "rejoin";
    case OperationKind::move:
      return "move";
  }
  return "?";
}

const char* to_string(State state) noexcept {
  switch (state) {
    case State::released:
      return "released";
    case State::gathering:
      return "gathering";
    case State::resident:
      return "resident";
    case State::closed:
      return "closed";
    case State::open:
      return "open";
    case State::reducing:
      return "reducing";
  }
  return "?";
}

}  // namespace fsdpp::device
