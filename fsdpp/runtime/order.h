#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace fsdpp::runtime {

/// One unit's stay in a pass through the model, in steps: step i is the i-th arrival at a unit.
struct Visit {
  int unit;
  int arrived;  // step of its own arrival
  int left;     // step of the last arrival before it left: >= arrived
};

/// The order in which one kind of pass (forward with gradient, backward, forward without) visits units:
/// predicts the next one from the last complete pass, and counts departures.
class Order {
 public:
  /// `expected`: the visits of a first pass, as registration suggests.
  explicit Order(std::vector<Visit> expected) : expected_(std::move(expected)) {}

  /// A pass begins: nothing has been visited.
  void begin();
  /// `unit` is reached. Returns the unit to prefetch, or -1 at the end of what is known.
  int arrive(int unit);
  /// The units that are expected after the last arrival, the next one first.
  [[nodiscard]] std::span<const Visit> ahead() const {
    return std::span(expected_).subspan(std::min(next_, expected_.size()));
  }
  /// `unit` is left for this pass.
  void leave(int unit);
  /// The pass is complete: what it did is expected next time. Returns true when that differs from before.
  bool complete();

  [[nodiscard]] const std::vector<Visit>& expected() const noexcept { return expected_; }
  /// Arrivals that were not the predicted unit.
  [[nodiscard]] int64_t departures() const noexcept { return departures_; }

 private:
  std::vector<Visit> expected_;
  std::vector<Visit> recorded_;
  std::size_t next_ = 0;  // index into expected_ of the predicted arrival
  int64_t departures_ = 0;
};

}  // namespace fsdpp::runtime
