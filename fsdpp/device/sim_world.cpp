#include "fsdpp/device/sim_world.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/device/sanitizer.h"

namespace fsdpp::device {
namespace {

constexpr int kHost = static_cast<int>(LaneKind::host);

std::size_t index_of(LaneKind lane) { return static_cast<std::size_t>(lane); }

// What the host did before it issued a wait for itself is over.
bool reached(const SimLanes& lanes, const Event& event) {
  return event.lane == LaneKind::host || lanes.ended[index_of(event.lane)] >= event.position;
}

// What ends its life holds garbage from here on, so that a late reader shows. What is freed in a lane's order
// is not touched: libtorch's allocator may have handed it out already.
void spoil(const Operation& operation) {
  const bool freed = operation.kind == OperationKind::free && operation.lane == LaneKind::host;
  if (operation.kind != OperationKind::release && !freed) return;
  for (const ByteRange& range : operation.writes) {
    if (freed) unpoison(range.begin, range.size);
    std::memset(const_cast<void*>(range.begin), kSimGarbage, range.size);
  }
}

}  // namespace

std::string sim_label(const Operation& operation) {
  std::string label =
      text(to_string(operation.lane), " #", operation.position, " ", to_string(operation.kind));
  if (!operation.name.empty()) label += " " + operation.name;
  if (operation.kind == OperationKind::wait)
    label += text(" (for ", to_string(operation.event.lane), " #", operation.event.position, ")");
  if (operation.kind == OperationKind::wait_signal) {
    label += text(" (rank ", operation.peer, ", channel ", operation.channel, ", sequence ",
                  operation.sequence, ")");
  }
  return label;
}

SimWorld::SimWorld(int ranks, SimOptions options)
    : picker_(ranks, options), models_(static_cast<std::size_t>(ranks)) {
  for (int rank = 0; rank < ranks; ++rank) hosts_.emplace_back();
}

void SimWorld::enter(int rank) {
  std::unique_lock lock(mutex_);
  if (++entered_ == ranks()) {
    turn_ = 0;
    hosts_.front().turn.notify_one();
  }
  hosts_[static_cast<std::size_t>(rank)].turn.wait(lock, [&] { return turn_ == rank || failed_; });
  if (failed_) throw SimFailure(why_);
}

void SimWorld::fail(const std::string& why) noexcept {
  const std::lock_guard lock(mutex_);
  if (!failed_) why_ = why;
  failed_ = true;
  for (Host& host : hosts_) host.turn.notify_one();
}

void SimWorld::hand_over(int rank) {
  const std::lock_guard lock(mutex_);
  turn_ = rank;
  hosts_[static_cast<std::size_t>(rank)].turn.notify_one();
}

void SimWorld::leave(int rank) noexcept {
  if (failed_) return;
  hosts_[static_cast<std::size_t>(rank)].ended = true;
  while (!failed_) {
    const SimChoice choice = choose(rank);
    if (choice.rank < 0) {
      const bool all = std::all_of(hosts_.begin(), hosts_.end(), [](const Host& host) { return host.ended; });
      return all ? void() : fail(report());
    }
    if (choice.lane == kHost) return hand_over(choice.rank);
    run(*lanes_[choice.index], choice.lane);
  }
}

void SimWorld::wait_until(int rank, const std::function<bool()>& reached, const std::string& what) {
  Host& host = hosts_[static_cast<std::size_t>(rank)];
  if (!failed_) {
    host.reached = reached;
    host.what = what;
    go_on(rank);
    host.reached = nullptr;
  }
  if (!failed_) return;
  const std::lock_guard lock(mutex_);
  throw SimFailure(why_);
}

// Returns when `rank`'s host was chosen, or the world has failed.
void SimWorld::go_on(int rank) {
  while (!failed_) {
    const SimChoice choice = choose(rank);
    if (choice.rank < 0) return fail(report());
    if (choice.lane != kHost) {
      run(*lanes_[choice.index], choice.lane);
      continue;
    }
    if (choice.rank == rank) return;
    hand_over(choice.rank);
    std::unique_lock lock(mutex_);
    hosts_[static_cast<std::size_t>(rank)].turn.wait(lock, [&] { return turn_ == rank || failed_; });
    return;
  }
}

SimChoice SimWorld::choose(int current) {
  std::vector<SimChoice> hosts;
  std::vector<SimChoice> lanes;
  for (int rank = 0; rank < ranks(); ++rank) {
    if (can_go_on(hosts_[static_cast<std::size_t>(rank)])) hosts.push_back({rank, kHost, 0, issued_});
  }
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    for (int lane = 0; lane < kHost; ++lane) {
      const auto& tasks = lanes_[i]->tasks[static_cast<std::size_t>(lane)];
      if (!tasks.empty() && can_run(*lanes_[i], tasks.front()))
        lanes.push_back({lanes_[i]->rank, lane, i, tasks.front().stamp});
    }
  }
  const SimChoice choice = picker_.pick(hosts, lanes, current);
  mix(static_cast<uint64_t>(choice.rank * kLaneKinds + choice.lane));
  return choice;
}

bool SimWorld::can_run(const SimLanes& lanes, const SimTask& task) const {
  const Operation& operation = task.operation;
  if (task.dropped) return true;
  if (operation.kind == OperationKind::wait) return reached(lanes, operation.event);
  if (operation.kind != OperationKind::wait_signal) return true;
  const auto counter = counters_.find({lanes.model, operation.peer, operation.channel});
  return counter != counters_.end() && counter->second >= operation.sequence;
}

void SimWorld::run(SimLanes& lanes, int lane) {
  auto& tasks = lanes.tasks[static_cast<std::size_t>(lane)];
  const SimTask task = std::move(tasks.front());
  tasks.pop_front();
  ++operations_;
  try {
    in_lane_ = true;
    if (!task.dropped) {
      spoil(task.operation);
      if (task.work) task.work();
      spoil_dead(task.operation);
      if (task.operation.kind == OperationKind::signal)
        raise(lanes, task.operation, static_cast<bool>(task.work));
    }
  } catch (const std::exception& error) {
    fail(text(sim_label(task.operation), " of rank ", lanes.rank, " threw: ", error.what()));
  } catch (...) {
    fail(text(sim_label(task.operation), " of rank ", lanes.rank, " threw"));
  }
  in_lane_ = false;
  lanes.ended[static_cast<std::size_t>(lane)] = task.operation.position;
}

// A signal without work is raised by the work of the next one on its lane (Peers::signal_published).
void SimWorld::raise(SimLanes& lanes, const Operation& operation, bool has_work) {
  auto& unraised = lanes.unraised[index_of(operation.lane)];
  unraised.push_back(operation);
  if (!has_work) return;
  for (const Operation& signal : unraised)
    counters_[{lanes.model, lanes.rank, signal.channel}] = signal.sequence;
  unraised.clear();
}

std::byte* SimWorld::lasting_memory(std::size_t bytes, const std::string& purpose) {
  const std::lock_guard lock(mutex_);
  memory_.push_back(host_memory(bytes, purpose, nullptr));
  return memory_.back().data();
}

void SimWorld::add(SimLanes& lanes) {
  if (failed_) throw SimFailure("a device was made in a world that had failed");
  lanes.model = models_[static_cast<std::size_t>(lanes.rank)]++;
  lanes_.push_back(&lanes);
}

void SimWorld::remove(SimLanes& lanes) noexcept {
  if (!failed_) std::erase(lanes_, &lanes);
}

void SimWorld::issue(SimLanes& lanes, const Operation& operation, std::function<void()> work, bool dropped) {
  if (failed_) return;  // the rank finds out at its next wait
  lanes.tasks[index_of(operation.lane)].push_back({operation, std::move(work), dropped, ++issued_});
  if (!picker_.host_goes_on(lanes.rank)) go_on(lanes.rank);
}

void SimWorld::run_on_host(SimLanes& lanes, const Operation& operation, const std::function<void()>& work) {
  if (operation.kind == OperationKind::wait)
    return wait_until(lanes.rank, [&] { return reached(lanes, operation.event); }, sim_label(operation));
  if (failed_) return;
  spoil(operation);
  if (operation.kind == OperationKind::free) dead_.push_back(operation.writes.front());
  if (work) work();
}

// What was given back is somebody else's: what is written there too late does not last.
void SimWorld::spoil_dead(const Operation& operation) {
  for (const ByteRange& range : dead_) {
    for (const ByteRange& written : operation.writes) {
      if (overlap(range, written)) std::memset(const_cast<void*>(range.begin), kSimGarbage, range.size);
    }
  }
}

std::string SimWorld::report() const {
  std::string lines = "nothing can run:";
  for (int rank = 0; rank < ranks(); ++rank) {
    const Host& host = hosts_[static_cast<std::size_t>(rank)];
    lines += text("\n  rank ", rank, ": its host ", host.ended ? "has ended" : "waits: " + host.what);
    for (const SimLanes* lanes : lanes_) {
      if (lanes->rank != rank) continue;
      for (const auto& tasks : lanes->tasks) {
        if (!tasks.empty())
          lines += text("\n    ", sim_label(tasks.front().operation), ", ", tasks.size() - 1,
                        " operations behind it");
      }
    }
  }
  return lines;
}

}  // namespace fsdpp::device
