#include "fsdpp/trace/operation_log.h"

#include "fsdpp/base/error.h"
#include "fsdpp/trace/recorder.h"

namespace fsdpp::trace {

void OperationLog::add(int thread, const device::Operation& operation) {
  Queue& queue = queues_[static_cast<std::size_t>(thread)];
  if (queue.first == 0) queue.first = operation.position;
  const auto [entry, is_new] = index_of_.try_emplace(operation.name, static_cast<uint32_t>(names_.size()));
  if (is_new) names_.push_back(operation.name);
  queue.entries.resize(operation.position - queue.first + 1);
  queue.entries.back() = {entry->second, operation.kind};
}

std::string OperationLog::describe(const Epoch& epoch) const {
  const device::Operation operation{
      .kind = kind(epoch), .lane = lane_of(epoch.thread), .position = epoch.position, .name = name(epoch)};
  return text(label(operation), " of rank ", rank_of(epoch.thread));
}

}  // namespace fsdpp::trace
