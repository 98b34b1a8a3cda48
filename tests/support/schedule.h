#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdpp/device/device.h"

namespace fsdpp::test {

/// One operation of one rank.
struct Step {
  int rank = 0;
  device::Operation operation;
};
/// The operations of all ranks of one model, in the order of issue.
using Schedule = std::vector<Step>;

/// Records the operations of all ranks into one schedule.
class ScheduleRecorder {
 public:
  explicit ScheduleRecorder(int ranks);
  [[nodiscard]] device::Observer* observer(int rank) {
    return observers_.at(static_cast<std::size_t>(rank)).get();
  }
  /// After the ranks have ended.
  [[nodiscard]] const Schedule& schedule() const noexcept { return schedule_; }

 private:
  std::mutex mutex_;
  Schedule schedule_;
  std::vector<std::unique_ptr<device::Observer>> observers_;
};

/// Names one operation of a schedule, in every run of the same program: for GateDevice::dropped and its like
/// too.
struct Place {
  int rank;
  device::LaneKind lane;
  uint64_t position;

  [[nodiscard]] static Place of(const Step& step) {
    return {step.rank, step.operation.lane, step.operation.position};
  }
  [[nodiscard]] bool is(int other_rank, const device::Operation& operation) const noexcept {
    return rank == other_rank && lane == operation.lane && position == operation.position;
  }
  friend auto operator<=>(const Place&, const Place&) = default;
};

/// A schedule with one fault put in.
struct Mutant {
  std::string kind;   // "wait dropped"
  std::size_t index;  // of the step that is changed
  std::string what;   // the operation, for people
  std::function<Schedule(const Schedule&)> apply;
  bool drops = false;  // the whole fault is that the step at `index` is left out: can be run on a live device
};

/// Every single fault of the kinds that a missing line of the runtime makes: each wait, record, wait_signal
/// and signal left out, each life's begin or end moved to each other lane, each release or free made before
/// the last use, each range of each operation cut to its first half.
[[nodiscard]] std::vector<Mutant> mutants_of(const Schedule& schedule);

/// `schedule` with positions counted anew, after steps were left out or moved. Waits for a record that is
/// gone are left out: a device takes them for reached.
[[nodiscard]] Schedule renumbered(Schedule schedule);

/// What the checker finds, as text; empty: nothing.
[[nodiscard]] std::string checked(const Schedule& schedule, int ranks);

}  // namespace fsdpp::test
