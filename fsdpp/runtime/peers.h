#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/comm/peer_group.h"
#include "fsdpp/device/device.h"

namespace fsdpp::runtime {

/// Numbers of the signal channels of one sharded model. Per parameter group four, all counted from 1.
struct Channel {
  static constexpr int kReleased = 0;  // "I will not pull the epoch before this one again"
  [[nodiscard]] static constexpr int published(int group) noexcept { return 1 + 4 * group; }  // shard valid
  [[nodiscard]] static constexpr int ready(int group) noexcept { return 2 + 4 * group; }      // slot complete
  [[nodiscard]] static constexpr int reduced(int group) noexcept {
    return 3 + 4 * group;
  }  // own region summed
  [[nodiscard]] static constexpr int pulled(int group) noexcept {
    return 4 + 4 * group;
  }  // peers' slots read
};

/// How one rank's model talks to its peers: signals and waits as operations of a lane, and a few words per
/// group.
class Peers {
 public:
  /// Collective. `groups`: names of the parameter groups, equal on all ranks.
  Peers(comm::PeerGroup& group, device::Device& device, const std::vector<std::string>& groups);

  [[nodiscard]] int rank() const noexcept { return group_.rank(); }
  [[nodiscard]] int ranks() const noexcept { return group_.ranks(); }
  [[nodiscard]] comm::PeerGroup& group() noexcept { return group_; }
  [[nodiscard]] device::Device& device() noexcept { return device_; }

  /// Raises our counter after the earlier operations of `lane`. `what` is for traces: "ready layers.3".
  void signal(device::LaneKind lane, const std::string& what, int channel, uint32_t sequence);
  /// Later operations of `lane` run after `peer` has raised its counter.
  void wait(device::LaneKind lane, const std::string& what, int peer, int channel, uint32_t sequence);
  /// wait() for every peer but ourselves.
  void wait_all(device::LaneKind lane, const std::string& what, int channel, uint32_t sequence);

  /// Says whether our slot of `group` holds values in its reduce number `sequence`: before that ready signal.
  void set_contributed(int group, uint32_t sequence, bool value);
  /// What `peer` said: after its ready signal. Kept for two reduces, since a peer may be one ahead.
  [[nodiscard]] bool contributed(int peer, int group, uint32_t sequence) const;

  /// A vote kept for two epochs: set before our released signal of `epoch`, read after the peers'.
  void set_vote(uint32_t epoch, uint64_t vote);
  [[nodiscard]] uint64_t vote(int peer, uint32_t epoch) const;

 private:
  [[nodiscard]] uint64_t* word(int peer, int index) const;

  comm::PeerGroup& group_;
  device::Device& device_;
  std::unique_ptr<comm::SignalBoard> board_;
  std::shared_ptr<comm::PeerMemory> words_;  // per rank: 2 votes, then 2 per group
};

}  // namespace fsdpp::runtime
