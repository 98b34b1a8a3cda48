#include "tests/support/schedule.h"

#include <algorithm>
#include <optional>

#include "fsdpp/base/error.h"
#include "fsdpp/trace/merge.h"
#include "fsdpp/trace/recorder.h"

namespace fsdpp::test {
namespace {

using device::LaneKind;
using device::Operation;
using device::OperationKind;

class OneRank final : public device::Observer {
 public:
  OneRank(int rank, std::mutex& mutex, Schedule& schedule)
      : rank_(rank), mutex_(mutex), schedule_(schedule) {}
  void on_operation(const Operation& operation) override {
    const std::lock_guard lock(mutex_);
    schedule_.push_back({rank_, operation});
  }

 private:
  int rank_;
  std::mutex& mutex_;
  Schedule& schedule_;
};

Mutant drop(std::size_t index, const std::string& kind) {
  return {kind,
          index,
          {},
          [index](const Schedule& schedule) {
            Schedule mutant = schedule;
            mutant.erase(mutant.begin() + static_cast<std::ptrdiff_t>(index));
            return renumbered(std::move(mutant));
          },
          true};
}

Mutant move_to_lane(std::size_t index, const std::string& kind, LaneKind lane) {
  return {text(kind, " on another lane"), index, text(" on ", device::to_string(lane)),
          [index, lane](const Schedule& schedule) {
            Schedule mutant = schedule;
            mutant[index].operation.lane = lane;
            return renumbered(std::move(mutant));
          }};
}

bool touches(const Operation& operation, const ByteRange& range) {
  const auto shared = [&](const ByteRange& other) { return overlap(range, other); };
  return std::any_of(operation.reads.begin(), operation.reads.end(), shared) ||
         std::any_of(operation.writes.begin(), operation.writes.end(), shared);
}

bool is_life(OperationKind kind) {
  return kind == OperationKind::acquire || kind == OperationKind::release || kind == OperationKind::free;
}

// The last step of the same rank before `index` that uses the memory that `index` lets go: what orders it
// behind other ranks' uses comes after it.
std::optional<std::size_t> last_use(const Schedule& schedule, std::size_t index) {
  for (std::size_t at = index; at-- > 0;) {
    if (schedule[at].rank != schedule[index].rank) continue;
    if (!touches(schedule[at].operation, schedule[index].operation.writes.front())) continue;
    if (!is_life(schedule[at].operation.kind)) return at;
    if (schedule[at].operation.kind == OperationKind::free) break;  // another allocation
  }
  return std::nullopt;
}

Mutant make_early(std::size_t index, const std::string& kind, std::size_t before) {
  return {kind, index, {}, [index, before](const Schedule& schedule) {
            Schedule mutant = schedule;
            const auto first = mutant.begin() + static_cast<std::ptrdiff_t>(before);
            const auto moved = mutant.begin() + static_cast<std::ptrdiff_t>(index);
            std::rotate(first, moved, moved + 1);
            return renumbered(std::move(mutant));
          }};
}

Mutant halve(std::size_t index, bool write, std::size_t range) {
  const auto cut = [index, write, range](const Schedule& schedule) {
    Schedule mutant = schedule;
    Operation& operation = mutant[index].operation;
    (write ? operation.writes : operation.reads)[range].size /= 2;
    if (operation.kind == OperationKind::copy) (write ? operation.reads : operation.writes)[range].size /= 2;
    return mutant;
  };
  return {write ? "written range halved" : "read range halved", index, text(" range ", range), cut};
}

void add_mutants_of_step(const Schedule& schedule, std::size_t index, std::vector<Mutant>& mutants) {
  const Operation& operation = schedule[index].operation;
  const std::string kind = device::to_string(operation.kind);
  switch (operation.kind) {
    case OperationKind::wait:
    case OperationKind::record:
    case OperationKind::signal:
    case OperationKind::wait_signal:
      mutants.push_back(drop(index, kind + " dropped"));
      return;
    case OperationKind::acquire:
    case OperationKind::release:
      for (const LaneKind lane : {LaneKind::compute, LaneKind::gather, LaneKind::reduce}) {
        if (lane != operation.lane) mutants.push_back(move_to_lane(index, kind, lane));
      }
      break;
    default:
      break;
  }
  const auto use = is_life(operation.kind) ? last_use(schedule, index) : std::nullopt;
  if (use && operation.kind == OperationKind::release)
    mutants.push_back(make_early(index, kind + " before the last use", *use));
  if (use && operation.kind ==
                 OperationKind::free)  // just behind: what is freed may be used again by its next owner
    mutants.push_back(make_early(index, kind + " before the end of the last use", *use + 1));
  const bool copies = operation.kind == OperationKind::copy;  // its two ranges are halved together
  for (std::size_t range = 0; !copies && range < operation.reads.size(); ++range)
    mutants.push_back(halve(index, false, range));
  for (std::size_t range = 0; range < operation.writes.size(); ++range)
    mutants.push_back(halve(index, true, range));
}

}  // namespace

ScheduleRecorder::ScheduleRecorder(int ranks) {
  for (int rank = 0; rank < ranks; ++rank)
    observers_.push_back(std::make_unique<OneRank>(rank, mutex_, schedule_));
}

std::vector<Mutant> mutants_of(const Schedule& schedule) {
  std::vector<Mutant> mutants;
  for (std::size_t index = 0; index < schedule.size(); ++index) add_mutants_of_step(schedule, index, mutants);
  for (Mutant& mutant : mutants) {
    const Step& step = schedule[mutant.index];
    mutant.what = text(trace::describe(step.operation), " of rank ", step.rank, mutant.what);
  }
  return mutants;
}

Schedule renumbered(Schedule schedule) {
  std::map<std::pair<int, LaneKind>, uint64_t> issued;
  std::map<Place, uint64_t> records;  // new positions
  Schedule result;
  result.reserve(schedule.size());
  for (Step& step : schedule) {
    Operation& operation = step.operation;
    const Place before = Place::of(step);
    if (operation.kind == OperationKind::wait) {
      const auto record = records.find({step.rank, operation.event.lane, operation.event.position});
      if (record == records.end()) continue;
      operation.event.position = record->second;
    }
    operation.position = ++issued[{step.rank, operation.lane}];
    if (operation.kind == OperationKind::record) {
      operation.event = {operation.lane, operation.position};
      records[before] = operation.position;
    }
    result.push_back(std::move(step));
  }
  return result;
}

std::string checked(const Schedule& schedule, int ranks) {
  trace::HazardChecker checker(ranks);
  trace::Merge merge(ranks,
                     [&](int rank, const Operation& operation) { checker.on_operation(rank, operation); });
  for (const Step& step : schedule) merge.add(step.rank, step.operation);
  trace::add_blocked(checker, merge);
  checker.finish();
  return checker.found() == 0 ? std::string() : checker.hazards().front().text;
}

}  // namespace fsdpp::test
