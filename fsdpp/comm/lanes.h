#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/comm/backend.h"

namespace fsdpp::comm {

class PeerGroup;

/// Counters that a rank's lanes raise and its peers' lanes wait for. Called inside a lane's operation.
///
/// A channel counts 1, 2, 3, ... and never skips. A wait is only for a number that the waiting rank's own
/// counter of the channel has reached in the lane's order: so a device may compare counters instead of being
/// told the number, and a recorded graph of operations can run again.
class LaneSignals {
 public:
  virtual ~LaneSignals() = default;
  /// Raises this rank's `channel` to `sequence`, which must be its value plus one.
  virtual void signal(int channel, uint32_t sequence) = 0;
  /// signal() of the channels first, first + stride, ... (`count` of them), all of which stand alike.
  virtual void signal_all(int first, int stride, int count, uint32_t sequence) {
    for (int i = 0; i < count; ++i) signal(first + i * stride, sequence);
  }
  /// What follows in the lane runs once `rank`'s `channel` has reached `sequence`.
  virtual void wait(int rank, int channel, uint32_t sequence) = 0;
};

/// Of a group whose bytes go through collectives: these are their own order between ranks.
class NoSignals final : public LaneSignals {
 public:
  void signal(int, uint32_t) override {}
  void wait(int, int, uint32_t) override {}
};

/// Collective operations of a library, for groups whose ranks cannot address each other's memory. Called
/// inside a lane's operation by every rank in the same order.
class Collectives {
 public:
  virtual ~Collectives() = default;
  /// `full` (ranks * bytes) gets every rank's `shard` (bytes), in rank order. `shard` may lie in its place.
  virtual void all_gather(void* full, const void* shard, std::size_t bytes) = 0;
  /// `shard` (count) gets the sum over ranks of its part of `full` (ranks * count), fp32. In the library's
  /// order.
  virtual void reduce_scatter(float* shard, const float* full, int64_t count) = 0;
};

/// How the lanes of one group's ranks reach each other.
class LaneTransport {
 public:
  virtual ~LaneTransport() = default;
  /// Collective: memory that the lanes of every rank can address, zero-filled; without peer access (see
  /// collectives()) only one's own. Throws as PeerBackend::allocate does.
  [[nodiscard]] virtual std::shared_ptr<PeerMemory> allocate(std::size_t bytes,
                                                             const std::string& purpose) = 0;
  /// Collective: a board with one channel per name.
  [[nodiscard]] virtual std::unique_ptr<LaneSignals> signals(std::vector<std::string> names,
                                                             const std::string& purpose) = 0;
  /// Collective: lanes of the same kind for a part of the group (PeerGroup::part); null: the part's own will
  /// do.
  [[nodiscard]] virtual std::unique_ptr<LaneTransport> for_part(PeerGroup& part) {
    static_cast<void>(part);
    return nullptr;
  }
  /// Before the process ends without destructors: tells peers that this rank does nothing for them any more,
  /// and gives them a moment where they need it. Of the whole group, for its parts too.
  virtual void leave() noexcept {}
  /// Not null: bytes go through these instead of through peers' memory, and signals are not needed.
  [[nodiscard]] virtual Collectives* collectives() noexcept { return nullptr; }
  [[nodiscard]] virtual std::string describe() const = 0;  // "shared memory", "NVLink peers", "NCCL"
  /// Index of the GPU whose lanes it serves, or -1: the host's.
  [[nodiscard]] virtual int gpu() const noexcept { return -1; }
};

}  // namespace fsdpp::comm
