#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "fsdpp/device/memory.h"
#include "fsdpp/device/operation.h"
#include "fsdpp/device/sim_picker.h"

namespace fsdpp::device {

/// A simulation cannot go on: nothing can run, or an operation threw. The text says what everybody waits for.
class SimFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What memory holds between its lives: a NaN in every float format.
inline constexpr int kSimGarbage = 0xFF;

/// An operation that was given to a lane and has not run.
struct SimTask {
  Operation operation;
  std::function<void()> work;
  bool dropped = false;  // has no effect when its turn comes
  uint64_t stamp = 0;    // order of issue among all ranks
};

/// The queues of one device. Positions count the operations of a lane, from 1.
struct SimLanes {
  int rank = 0;
  int model = 0;  // n-th device of its rank
  std::array<std::deque<SimTask>, kLaneKinds> tasks;
  std::array<uint64_t, kLaneKinds> ended{};
  std::array<std::vector<Operation>, kLaneKinds> unraised;  // signals that the next one's work raises too
};

/// What runs when, of all ranks: their hosts, which are threads, and the lanes of their devices. One thing at
/// a time, chosen by seed: two runs with the same seed are the same, and what can happen on a device happens
/// under some seed. A host runs in its own thread, a lane's operation in any host's.
class SimWorld {
 public:
  SimWorld(int ranks, SimOptions options);

  /// `rank`'s thread takes part from here on: returns at its first turn, once all ranks have come.
  void enter(int rank);
  /// `rank`'s thread takes no part any more.
  void leave(int rank) noexcept;
  /// The rank's thread goes on once `reached` says so, which is asked in any thread; others run meanwhile.
  /// Throws SimFailure when it never can, or when the world has failed.
  void wait_until(int rank, const std::function<bool()>& reached, const std::string& what);
  /// The world stands still from here on: every rank's next wait throws a SimFailure with `why`.
  void fail(const std::string& why) noexcept;
  [[nodiscard]] bool failed() const noexcept { return failed_; }

  /// Zero-filled host memory that stays until the world ends: an operation that comes too late meets garbage,
  /// and no hole.
  [[nodiscard]] std::byte* lasting_memory(std::size_t bytes, const std::string& purpose);

  // For SimDevice.
  void add(SimLanes& lanes);
  void remove(SimLanes& lanes) noexcept;
  void issue(SimLanes& lanes, const Operation& operation, std::function<void()> work, bool dropped);
  /// Runs `work` of a host's operation at once.
  void run_on_host(SimLanes& lanes, const Operation& operation, const std::function<void()>& work);

  [[nodiscard]] const SimOptions& options() const noexcept { return picker_.options(); }
  [[nodiscard]] int ranks() const noexcept { return static_cast<int>(hosts_.size()); }
  [[nodiscard]] int units_ahead() const noexcept { return picker_.units_ahead(); }
  [[nodiscard]] uint64_t operations() const noexcept { return operations_; }  // run so far
  /// A number for the order in which everything ran so far.
  [[nodiscard]] uint64_t order() const noexcept { return order_; }
  /// An operation of a lane runs now.
  [[nodiscard]] bool in_lane() const noexcept { return in_lane_; }

 private:
  struct Host {
    std::condition_variable turn;
    bool ended = false;
    std::function<bool()> reached;  // empty: it can go on
    std::string what;
  };

  [[nodiscard]] bool can_go_on(const Host& host) const {
    return !host.ended && (!host.reached || host.reached());
  }
  [[nodiscard]] bool can_run(const SimLanes& lanes, const SimTask& task) const;
  [[nodiscard]] SimChoice choose(int current);
  void go_on(int rank);
  void run(SimLanes& lanes, int lane);
  void raise(SimLanes& lanes, const Operation& operation, bool has_work);
  void hand_over(int rank);
  void spoil_dead(const Operation& operation);
  [[nodiscard]] std::string report() const;
  void mix(uint64_t value) noexcept { order_ = (order_ ^ (value + 1)) * 1099511628211ULL; }  // FNV-1a

  SimPicker picker_;
  std::mutex mutex_;  // of turn_, why_ and memory_; everything else belongs to whose turn it is
  std::deque<Host> hosts_;
  int turn_ = -1;
  int entered_ = 0;
  std::atomic<bool> failed_{false};
  std::string why_;
  std::vector<Memory> memory_;

  std::vector<SimLanes*> lanes_;
  std::vector<int> models_;                                 // per rank: devices made
  std::map<std::tuple<int, int, int>, uint32_t> counters_;  // by model, rank and channel
  std::vector<ByteRange> dead_;                             // given back by hosts; never handed out again
  bool in_lane_ = false;
  uint64_t issued_ = 0;
  uint64_t operations_ = 0;
  uint64_t order_ = 1469598103934665603ULL;
};

/// "wait_signal ready layers.3 of rank 1, channel 5, sequence 2"
[[nodiscard]] std::string sim_label(const Operation& operation);

}  // namespace fsdpp::device
