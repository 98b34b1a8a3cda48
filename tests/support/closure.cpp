#include "tests/support/closure.h"

#include <algorithm>
#include <map>
#include <queue>
#include <set>

#include "fsdpp/base/error.h"
#include "fsdpp/trace/recorder.h"

namespace fsdpp::test {

using device::LaneKind;
using device::Operation;
using device::OperationKind;

Closure::Closure(const Schedule& schedule)
    : schedule_(schedule), before_(schedule.size()), releases_(schedule.size()) {}

std::string Closure::name(std::size_t step) const {
  return text(trace::describe(schedule_[step].operation), " of rank ", schedule_[step].rank);
}

std::string Closure::broken() {
  find_edges();
  if (!order_steps()) return "ranks wait for each other";
  close();
  cut_memory();
  check_counters();
  check_rejoins();
  check_lives();
  check_pairs();
  return broken_;
}

void Closure::find_edges() {
  std::map<std::pair<int, LaneKind>, std::size_t> last;
  std::map<Place, std::size_t> records;
  std::map<std::pair<int, int>, std::map<uint32_t, std::size_t>> signals;  // by rank and channel, by sequence
  for (std::size_t step = 0; step < schedule_.size(); ++step) {
    const auto& [rank, operation] = schedule_[step];
    if (const auto own = last.find({rank, operation.lane}); own != last.end()) add_edge(own->second, step);
    if (const auto host = last.find({rank, LaneKind::host}); host != last.end()) add_edge(host->second, step);
    last[{rank, operation.lane}] = step;
    if (operation.kind == OperationKind::record) records[Place::of(schedule_[step])] = step;
    if (operation.kind == OperationKind::wait) {
      const auto record = records.find({rank, operation.event.lane, operation.event.position});
      if (record != records.end()) {
        add_edge(record->second, step);
      } else {
        fail(name(step) + " waits for no record");
      }
    }
    if (operation.kind == OperationKind::signal)
      signals[{rank, operation.channel}].try_emplace(operation.sequence, step);
  }
  for (std::size_t step = 0; step < schedule_.size(); ++step) {
    const Operation& operation = schedule_[step].operation;
    if (operation.kind != OperationKind::wait_signal) continue;
    const auto& raised = signals[{operation.peer, operation.channel}];
    const auto signal = raised.lower_bound(operation.sequence);
    if (signal == raised.end()) {
      fail(name(step) + " waits for no signal");
    } else {
      add_edge(signal->second, step);
      releases_[step].push_back(signal->second);
    }
  }
}

// An order in which hosts that block in every wait_signal can issue the steps, the earliest first (Kahn).
// False: there is none.
bool Closure::order_steps() {
  std::vector<int> open(schedule_.size());  // predecessors that are not issued
  std::vector<std::vector<std::size_t>> after(schedule_.size());
  std::map<int, std::size_t> last;
  for (std::size_t step = 0; step < schedule_.size(); ++step) {
    const auto add = [&](std::size_t from) {
      after[from].push_back(step);
      ++open[step];
    };
    if (const auto own = last.find(schedule_[step].rank); own != last.end()) add(own->second);
    last[schedule_[step].rank] = step;
    for (const std::size_t signal : releases_[step]) add(signal);
  }
  std::priority_queue<std::size_t, std::vector<std::size_t>, std::greater<>> ready;
  for (std::size_t step = 0; step < schedule_.size(); ++step) {
    if (open[step] == 0) ready.push(step);
  }
  while (!ready.empty()) {
    const std::size_t step = ready.top();
    ready.pop();
    order_.push_back(step);
    for (const std::size_t next : after[step]) {
      if (--open[next] == 0) ready.push(next);
    }
  }
  return order_.size() == schedule_.size();
}

void Closure::close() {
  const std::size_t words = schedule_.size() / 64 + 1;
  reach_.assign(schedule_.size(), std::vector<uint64_t>(words));
  for (const std::size_t step : order_) {
    for (const std::size_t from : before_[step]) {
      for (std::size_t word = 0; word < words; ++word) reach_[step][word] |= reach_[from][word];
      reach_[step][from / 64] |= uint64_t{1} << (from % 64);
    }
  }
}

std::size_t Closure::cell_at(uintptr_t address) const {
  return static_cast<std::size_t>(std::lower_bound(edges_.begin(), edges_.end(), address) - edges_.begin());
}

template <class Visit>
void Closure::each_cell(const ByteRange& range, Visit&& visit) const {
  const std::size_t end = cell_at(range.end());
  for (std::size_t cell = cell_at(range.first()); cell < end; ++cell) visit(cell);
}

void Closure::cut_memory() {
  for (const Step& step : schedule_) {
    for (const auto* ranges : {&step.operation.reads, &step.operation.writes}) {
      for (const ByteRange& range : *ranges) edges_.insert(edges_.end(), {range.first(), range.end()});
    }
  }
  std::sort(edges_.begin(), edges_.end());
  edges_.erase(std::unique(edges_.begin(), edges_.end()), edges_.end());
  while (cut_copies_alike()) continue;
  cells_.resize(edges_.size());
  accesses_.resize(edges_.size());
  for (const std::size_t step : order_) {
    const Operation& operation = schedule_[step].operation;
    Use write = Use::write;
    if (operation.kind == OperationKind::acquire) write = Use::acquire;
    if (operation.kind == OperationKind::release) write = Use::release;
    if (operation.kind == OperationKind::free) write = Use::free;
    const Use read = operation.kind == OperationKind::copy ? Use::copy_in : Use::read;
    for (const ByteRange& range : operation.reads)
      each_cell(range, [&](std::size_t cell) { accesses_[cell].push_back({step, read}); });
    for (const ByteRange& range : operation.writes)
      each_cell(range, [&](std::size_t cell) { accesses_[cell].push_back({step, write}); });
  }
}

// What a copy brings is cut as where it comes from: a part that was never written stays told apart.
bool Closure::cut_copies_alike() {
  std::vector<uintptr_t> more;
  const auto cut_as = [&](const ByteRange& from, const ByteRange& to) {
    for (auto edge = std::upper_bound(edges_.begin(), edges_.end(), from.first());
         edge != edges_.end() && *edge < from.end(); ++edge) {
      const uintptr_t there = *edge - from.first() + to.first();
      if (!std::binary_search(edges_.begin(), edges_.end(), there)) more.push_back(there);
    }
  };
  for (const Step& step : schedule_) {
    const Operation& operation = step.operation;
    for (std::size_t i = 0; operation.kind == OperationKind::copy && i < operation.reads.size(); ++i)
      cut_as(operation.reads[i], operation.writes[i]);
  }
  edges_.insert(edges_.end(), more.begin(), more.end());
  std::sort(edges_.begin(), edges_.end());
  edges_.erase(std::unique(edges_.begin(), edges_.end()), edges_.end());
  return !more.empty();
}

// A counter rises by one, each raise after the one before it; who waits for peers' has raised its own.
void Closure::check_counters() {
  std::map<std::pair<int, int>, std::vector<std::size_t>> raises;  // by rank and channel, in order of issue
  for (const std::size_t step : order_) {
    const auto& [rank, operation] = schedule_[step];
    if (operation.kind == OperationKind::signal) raises[{rank, operation.channel}].push_back(step);
  }
  for (const auto& [counter, steps] : raises) {
    for (std::size_t i = 1; i < steps.size(); ++i) {
      const Operation& before = schedule_[steps[i - 1]].operation;
      if (schedule_[steps[i]].operation.sequence != before.sequence + 1) fail(name(steps[i]) + " skips");
      if (!reaches(steps[i - 1], steps[i])) fail(name(steps[i]) + " is not behind the raise before it");
    }
  }
  for (std::size_t step = 0; step < schedule_.size(); ++step) {
    const auto& [rank, operation] = schedule_[step];
    if (operation.kind == OperationKind::wait_signal) check_wait(step, raises[{rank, operation.channel}]);
  }
}

void Closure::check_wait(std::size_t step, const std::vector<std::size_t>& own) {
  const auto reached = [&](std::size_t raise) {
    return raise < step && schedule_[raise].operation.sequence >= schedule_[step].operation.sequence;
  };
  const auto raise = std::find_if(own.begin(), own.end(), reached);
  if (raise != own.end() ? !reaches(*raise, step) : !own.empty() && own.back() > step)
    fail(name(step) + " is not behind its own counter");
}

void Closure::check_rejoins() {
  const std::set<OperationKind> idle = {OperationKind::record, OperationKind::wait,
                                        OperationKind::wait_signal, OperationKind::rejoin};
  for (std::size_t step = 0; step < schedule_.size(); ++step) {
    if (schedule_[step].operation.kind != OperationKind::rejoin) continue;
    for (std::size_t other = 0; other < step; ++other) {
      const auto& [rank, operation] = schedule_[other];
      if (rank != schedule_[step].rank || operation.lane == LaneKind::host || idle.count(operation.kind) > 0)
        continue;
      if (!reaches(other, step)) fail(name(step) + " is not behind " + name(other));
    }
  }
}

// Follows every finest range through its lives, in one order of issue.
void Closure::check_lives() {
  for (const std::size_t step : order_) {
    const Operation& operation = schedule_[step].operation;
    for (const ByteRange& range : operation.reads) {
      const Use use = operation.kind == OperationKind::copy ? Use::copy_in : Use::read;
      each_cell(range, [&](std::size_t cell) { check_life(step, cell, use); });
    }
    Use use = Use::write;
    if (operation.kind == OperationKind::acquire) use = Use::acquire;
    if (operation.kind == OperationKind::release) use = Use::release;
    if (operation.kind == OperationKind::free) use = Use::free;
    for (const ByteRange& range : operation.writes)
      each_cell(range, [&](std::size_t cell) { check_life(step, cell, use); });
    for (std::size_t i = 0; operation.kind == OperationKind::copy && i < operation.reads.size(); ++i)
      check_copy(operation.reads[i], operation.writes[i]);
  }
}

void Closure::check_life(std::size_t step, std::size_t index, Use use) {
  Cell& cell = cells_[index];
  switch (use) {
    case Use::acquire:
      if (cell.alive) fail(name(step) + " begins a life inside another");
      cell = {.alive = true, .unwritten = true, .life = step};
      return;
    case Use::release:
      if (!cell.alive) fail(name(step) + " ends no life");
      if (cell.alive && schedule_[cell.life].operation.writes.front().size !=
                            schedule_[step].operation.writes.front().size) {
        fail(name(step) + " ends another range than began");
      }
      cell.alive = false;
      cell.ended = true;
      return;
    case Use::free:
      cell = {};
      return;
    case Use::read:
      if (cell.unwritten) fail(name(step) + " reads what nothing has written");
      break;
    case Use::copy_in:
      break;
    case Use::write:
      cell.unwritten = false;
      break;
  }
  if (cell.ended) fail(name(step) + " uses memory between its lives");
}

// What the source lacks, the target lacks.
void Closure::check_copy(const ByteRange& source, const ByteRange& target) {
  each_cell(target, [&](std::size_t index) {
    const ByteRange part{reinterpret_cast<const void*>(edges_[index] - target.first() + source.first()),
                         edges_[index + 1] - edges_[index]};
    for (std::size_t from = 0; from + 1 < edges_.size(); ++from) {
      if (!cells_[from].unwritten) continue;
      if (edges_[from] < part.end() && part.first() < edges_[from + 1]) cells_[index].unwritten = true;
    }
  });
}

// All pairs of accesses to one range, between two times that it was given back to the system.
void Closure::check_pairs() {
  for (const auto& accesses : accesses_) {
    std::size_t first = 0;
    for (std::size_t second = 0; second < accesses.size(); ++second) {
      const auto is_read = [](Use use) { return use == Use::read || use == Use::copy_in; };
      for (std::size_t other = first; other < second; ++other) {
        if (is_read(accesses[other].use) && is_read(accesses[second].use)) continue;
        if (accesses[other].step == accesses[second].step) continue;
        if (!reaches(accesses[other].step, accesses[second].step))
          return fail(name(accesses[second].step) + " is not ordered after " + name(accesses[other].step));
      }
      if (accesses[second].use == Use::free) first = second + 1;
    }
  }
}

}  // namespace fsdpp::test
