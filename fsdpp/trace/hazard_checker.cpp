#include "fsdpp/trace/hazard_checker.h"

#include <algorithm>
#include <utility>

#include "fsdpp/base/error.h"

namespace fsdpp::trace {

using device::LaneKind;
using device::OperationKind;

HazardChecker::HazardChecker(int ranks)
    : ranks_(ranks),
      log_(ranks * device::kLaneKinds),
      last_work_(static_cast<std::size_t>(ranks * device::kLaneKinds)),
      events_(static_cast<std::size_t>(ranks * device::kLaneKinds)),
      states_(static_cast<std::size_t>(ranks)),
      memory_([this](const ShadowMemory::Finding& finding) { report_memory(finding); }) {
  require(ranks > 0, "a hazard checker for ", ranks, " ranks was asked for, expected at least 1");
  const int threads = ranks * device::kLaneKinds;
  for (int thread = 0; thread < threads; ++thread) queues_.emplace_back(thread, threads);
}

void HazardChecker::on_operation(int rank, const Operation& operation) {
  require(rank >= 0 && rank < ranks_, "hazard checker: an operation of rank ", rank, " among ", ranks_,
          " ranks");
  ++operations_;
  QueueClock& queue = this->queue(thread_of(rank, operation.lane));
  log_.add(queue.now().thread, operation);
  step(queue, operation);
  switch (operation.kind) {
    case OperationKind::record:
      return on_record(queue);
    case OperationKind::wait:
      return on_wait(queue, operation);
    case OperationKind::signal:
      return on_signal(queue, operation);
    case OperationKind::wait_signal:
      return on_wait_signal(queue, operation);
    case OperationKind::collective:
      on_memory(queue, operation);
      return on_collective(queue, operation);
    case OperationKind::rejoin:
      return on_rejoin(queue);
    case OperationKind::move:
      return on_move(queue, operation);
    default:
      return on_memory(queue, operation);
  }
}

// The host issues an operation after what it has done itself.
void HazardChecker::step(QueueClock& queue, const Operation& operation) {
  const int thread = queue.now().thread;
  queue.step(operation.position);
  QueueClock& host = this->queue(thread_of(rank_of(thread), LaneKind::host));
  if (!queue.covers(host.now())) queue.join(host.stamp());
  const bool is_work = operation.kind != OperationKind::record && operation.kind != OperationKind::wait &&
                       operation.kind != OperationKind::wait_signal &&
                       operation.kind != OperationKind::rejoin;
  if (is_work) last_work_[static_cast<std::size_t>(thread)] = operation.position;
}

void HazardChecker::on_record(QueueClock& queue) {
  events_[static_cast<std::size_t>(queue.now().thread)].insert_or_assign(queue.now().position, queue.stamp());
}

void HazardChecker::on_wait(QueueClock& queue, const Operation& operation) {
  const int thread = thread_of(rank_of(queue.now().thread), operation.event.lane);
  const uint64_t position = operation.event.position;
  const auto& events = events_[static_cast<std::size_t>(thread)];
  const auto found = events.find(position);
  if (found != events.end()) return queue.join(found->second);
  const uint64_t first = log_.first_position(thread);
  if (first != 0 && position < first) return;  // recorded before the trace began
  report(HazardKind::event, {}, queue.now(),
         text("waits for ", device::to_string(operation.event.lane), " #", position,
              " of its rank, which no record made"));
}

void HazardChecker::on_collective(QueueClock& queue, const Operation& operation) {
  const device::Collective& called = *operation.collective;
  auto& meetings = meetings_[called.group];
  const std::size_t number = met_[{called.group, rank_of(queue.now().thread)}]++;
  if (number == meetings.size()) meetings.push_back({queue.now(), called, {}, {}});
  Meeting& meeting = meetings[number];
  const device::Collective& expected = meeting.called;
  if (called.kind != expected.kind || called.count != expected.count || called.dtype != expected.dtype ||
      called.ranks != expected.ranks) {
    const auto say = [](const device::Collective& c) {
      return text(c.kind, " of ", c.count, " ", c.dtype, " among ", c.ranks, " ranks");
    };
    report(HazardKind::collective, meeting.first, queue.now(),
           text("is collective ", number + 1, " of group ", called.group, " on its rank and calls ",
                say(called), ", but ", log_.describe(meeting.first), " calls ", say(expected)));
  }
  meeting.members.push_back(queue.now());
  meeting.stamps.push_back(queue.stamp());
  if (static_cast<int>(meeting.members.size()) < expected.ranks) return;
  for (const Epoch& member : meeting.members) {
    for (const Stamp& stamp : meeting.stamps) this->queue(member.thread).join(stamp);
  }
  meeting.stamps.clear();
}

void HazardChecker::on_rejoin(const QueueClock& queue) {
  const int rank = rank_of(queue.now().thread);
  for (const LaneKind lane : {LaneKind::compute, LaneKind::gather, LaneKind::reduce}) {
    const int thread = thread_of(rank, lane);
    const Epoch last{thread, last_work_[static_cast<std::size_t>(thread)]};
    if (queue.covers(last)) continue;
    report(HazardKind::not_rejoined, last, queue.now(),
           text("must be behind ", log_.describe(last), ": no wait orders the ",
                device::to_string(lane_of(queue.now().thread)), " lane after it (it knows the ",
                device::to_string(lane), " lane up to #", queue.known()[thread], ")"));
  }
}

void HazardChecker::on_move(const QueueClock& queue, const Operation& operation) {
  const int rank = rank_of(queue.now().thread);
  const std::string wrong =
      states_[static_cast<std::size_t>(rank)].move(operation.name, operation.from, operation.to);
  if (!wrong.empty()) report(HazardKind::state, {}, queue.now(), wrong);
}

void HazardChecker::on_memory(const QueueClock& queue, const Operation& operation) {
  switch (operation.kind) {
    case OperationKind::acquire:
      return memory_.acquire(queue, operation.writes.front());
    case OperationKind::release:
      return memory_.release(queue, operation.writes.front());
    case OperationKind::free:
      return memory_.free(queue, operation.writes.front());
    case OperationKind::copy:
      for (std::size_t i = 0; i < operation.reads.size(); ++i)
        memory_.copy(queue, operation.reads[i], operation.writes[i]);
      return;
    default:
      for (const ByteRange& range : operation.reads) memory_.read(queue, range);
      for (const ByteRange& range : operation.writes) memory_.write(queue, range);
  }
}

void HazardChecker::finish() {
  for (const auto& [group, meetings] : meetings_) {
    for (const Meeting& meeting : meetings) {
      const auto came = static_cast<int>(meeting.members.size());
      if (came == meeting.called.ranks) continue;
      std::string ranks;
      for (const Epoch& member : meeting.members) ranks += text(" ", rank_of(member.thread));
      report(HazardKind::collective, {}, meeting.first,
             text("calls ", meeting.called.kind, " in group ", group, ", which only ", came, " of ",
                  meeting.called.ranks, " ranks call: rank", ranks));
    }
  }
}

}  // namespace fsdpp::trace
