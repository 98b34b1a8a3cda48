// The checker's rules about counters: what a signal hands on, and what lanes may wait for.
#include <algorithm>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/trace/hazard_checker.h"

namespace fsdpp::trace {

void HazardChecker::on_signal(QueueClock& queue, const Operation& operation) {
  Channel& channel = channels_[{rank_of(queue.now().thread), operation.channel}];
  const std::string raises = text("raises channel ", operation.channel, " to ", operation.sequence);
  if (channel.waited.position != 0) {
    report(HazardKind::signal, channel.waited, queue.now(),
           text(raises, " after ", log_.describe(channel.waited),
                ", which waits for peers to do so: a device may "
                "compare counters, so its own comes first"));
    channel.waited = {};
  }
  if (!channel.raised.empty()) {
    const Raised& last = channel.raised.back();
    if (operation.sequence != last.sequence + 1) {
      report(HazardKind::signal, last.stamp.self, queue.now(),
             text(raises, " after ", log_.describe(last.stamp.self), " raised it to ", last.sequence,
                  ": expected ", last.sequence + 1));
      if (operation.sequence <= last.sequence) return;
    } else if (!queue.covers(last.stamp.self)) {
      report(HazardKind::signal, last.stamp.self, queue.now(),
             text(raises, " and must wait for ", log_.describe(last.stamp.self), ", which raises it to ",
                  last.sequence, ": no wait or record orders them"));
    }
  }
  channel.raised.push_back({operation.sequence, queue.stamp()});
}

const HazardChecker::Raised* HazardChecker::Channel::find(uint32_t sequence) const {
  const auto found =
      std::lower_bound(raised.begin(), raised.end(), sequence,
                       [](const Raised& entry, uint32_t wanted) { return entry.sequence < wanted; });
  return found == raised.end() ? nullptr : &*found;
}

void HazardChecker::on_wait_signal(QueueClock& queue, const Operation& operation) {
  require_own_counter(queue, operation);
  const Raised* const raised = channels_[{operation.peer, operation.channel}].find(operation.sequence);
  if (raised != nullptr) return queue.join(raised->stamp);
  report(HazardKind::signal, {}, queue.now(),
         text("waits until rank ", operation.peer, " raises channel ", operation.channel, " to ",
              operation.sequence, ", which it never does"));
}

// On a channel that the waiting rank raises too, a device may wait until the peer's counter has reached its
// own: that is too early unless its own was raised before (comm/lanes.h).
void HazardChecker::require_own_counter(const QueueClock& queue, const Operation& operation) {
  Channel& own = channels_[{rank_of(queue.now().thread), operation.channel}];
  const Raised* const raised = own.find(operation.sequence);
  if (raised == nullptr) {
    if (own.waited.position == 0) own.waited = queue.now();  // wrong if it is raised later
  } else if (!queue.covers(raised->stamp.self)) {
    report(HazardKind::signal, raised->stamp.self, queue.now(),
           text("waits for rank ", operation.peer, " to raise channel ", operation.channel, " to ",
                operation.sequence, " and must first wait for ", log_.describe(raised->stamp.self),
                ", which raises its own: no wait or record orders them"));
  }
}

}  // namespace fsdpp::trace
