#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fsdpp/device/operation.h"

namespace fsdpp::trace {

/// One operation among all ranks': the `position`-th (from 1) of queue `thread`, which is rank * kLaneKinds +
/// lane. Position 0: no operation.
struct Epoch {
  int thread = 0;
  uint64_t position = 0;

  friend bool operator==(const Epoch&, const Epoch&) = default;
};

[[nodiscard]] constexpr int thread_of(int rank, device::LaneKind lane) noexcept {
  return rank * device::kLaneKinds + static_cast<int>(lane);
}
[[nodiscard]] constexpr int rank_of(int thread) noexcept { return thread / device::kLaneKinds; }
[[nodiscard]] constexpr device::LaneKind lane_of(int thread) noexcept {
  return static_cast<device::LaneKind>(thread % device::kLaneKinds);
}

/// Per queue, up to which position its operations are known to have ended (Fidge and Mattern).
class VectorClock {
 public:
  explicit VectorClock(int threads) : positions_(static_cast<std::size_t>(threads)) {}

  [[nodiscard]] uint64_t operator[](int thread) const { return positions_[static_cast<std::size_t>(thread)]; }
  [[nodiscard]] bool covers(const Epoch& epoch) const { return (*this)[epoch.thread] >= epoch.position; }
  void advance(const Epoch& to) {
    uint64_t& position = positions_[static_cast<std::size_t>(to.thread)];
    position = std::max(position, to.position);
  }
  void join(const VectorClock& other) {
    for (std::size_t i = 0; i < positions_.size(); ++i)
      positions_[i] = std::max(positions_[i], other.positions_[i]);
  }

 private:
  std::vector<uint64_t> positions_;
};

/// What a record or a signal hands on: its own operation and all that its queue knew then.
struct Stamp {
  Epoch self;
  std::shared_ptr<const VectorClock> known;  // of other queues; shared until the queue learns more
};

/// What one queue knows. Its own operations are known to it by order.
class QueueClock {
 public:
  QueueClock(int thread, int threads) : now_{thread, 0}, known_(threads) {}

  [[nodiscard]] const Epoch& now() const noexcept { return now_; }
  [[nodiscard]] const VectorClock& known() const noexcept { return known_; }
  [[nodiscard]] bool covers(const Epoch& epoch) const {
    return epoch.thread == now_.thread ? epoch.position <= now_.position : known_.covers(epoch);
  }

  /// The queue goes on to its operation at `position`.
  void step(uint64_t position) noexcept { now_.position = position; }
  /// Learns what `stamp` knew. Cheap when that is known already: who knows an operation knows all it knew.
  void join(const Stamp& stamp) {
    if (stamp.known == nullptr || covers(stamp.self)) return;
    known_.join(*stamp.known);
    known_.advance(stamp.self);
    shared_.reset();
  }
  [[nodiscard]] Stamp stamp() {
    if (shared_ == nullptr) shared_ = std::make_shared<const VectorClock>(known_);
    return {now_, shared_};
  }

 private:
  Epoch now_;
  VectorClock known_;
  std::shared_ptr<const VectorClock> shared_;  // equal to known_, or null
};

}  // namespace fsdpp::trace
