#include "fsdpp/trace/recorder.h"

#include <algorithm>

#include "fsdpp/base/error.h"

namespace fsdpp::trace {

std::size_t Recorder::count(device::OperationKind kind, const std::string& prefix) const {
  return static_cast<std::size_t>(
      std::count_if(operations_.begin(), operations_.end(), [&](const device::Operation& operation) {
        return operation.kind == kind && operation.name.starts_with(prefix);
      }));
}

std::vector<std::string> Recorder::names(const std::function<bool(const device::Operation&)>& keep) const {
  std::vector<std::string> result;
  for (const device::Operation& operation : operations_) {
    if (keep(operation)) result.push_back(operation.name);
  }
  return result;
}

std::string label(const device::Operation& operation) {
  std::string line = text(device::to_string(operation.lane), " #", operation.position, " ",
                          device::to_string(operation.kind));
  return operation.name.empty() ? line : line + " " + operation.name;
}

std::string describe(const device::Operation& operation) {
  using device::OperationKind;
  std::string line = label(operation);
  if (operation.kind == OperationKind::wait_signal) line += text(" (rank ", operation.peer, ", channel ");
  if (operation.kind == OperationKind::signal) line += " (channel ";
  if (operation.kind == OperationKind::signal || operation.kind == OperationKind::wait_signal) {
    line += text(operation.channel, ", sequence ", operation.sequence, ")");
  }
  if (operation.kind == OperationKind::wait) {
    line += text(" (", device::to_string(operation.event.lane), " #", operation.event.position, ")");
  }
  return line;
}

}  // namespace fsdpp::trace
