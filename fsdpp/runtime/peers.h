#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/buffer/sharded_buffer.h"
#include "fsdpp/comm/peer_group.h"
#include "fsdpp/device/device.h"

namespace fsdpp::runtime {

/// Numbers of the signal channels of one sharded model. Per parameter group six, all counted from 1.
struct Channel {
  static constexpr int kBarrier = -2;  // the group's own, named in traces alone
  static constexpr int kNeeds = -3;    // likewise: the hosts' exchange_needs()
  static constexpr int kReleased = 0;  // "I will not pull the epoch before this one again"
  static constexpr int kScalars = 1;   // "my numbers of the next exchange can be read"
  static constexpr int kPerGroup = 6;
  [[nodiscard]] static constexpr int published(int group) noexcept { return of(group, 0); }  // shard valid
  [[nodiscard]] static constexpr int ready(int group) noexcept { return of(group, 1); }      // slot complete
  [[nodiscard]] static constexpr int reduced(int group) noexcept {
    return of(group, 2);
  }  // own region summed
  [[nodiscard]] static constexpr int pulled(int group) noexcept { return of(group, 3); }  // peers' slots read
  [[nodiscard]] static constexpr int rows_ready(int group) noexcept { return of(group, 4); }  // rows complete
  [[nodiscard]] static constexpr int rows_pulled(int group) noexcept {
    return of(group, 5);
  }  // peers' rows read

 private:
  static constexpr int of(int group, int which) noexcept { return 2 + kPerGroup * group + which; }
};

/// Throws UsageError unless `device`'s lanes run where those of `group` reach: on the host, or the same GPU.
void check_lanes(comm::PeerGroup& group, const device::Device& device);

/// How one rank's model talks to its peers: memory, signals and waits of its lanes, and what the hosts agree.
class Peers {
 public:
  /// Collective. `groups`: names of the parameter groups, equal on all ranks. `first_channel`: of what traces
  /// show; the ranges of one device's Peers must not meet. Throws as check_lanes() does.
  Peers(comm::PeerGroup& group, device::Device& device, const std::vector<std::string>& groups,
        int first_channel = 0);

  [[nodiscard]] int rank() const noexcept { return group_.rank(); }
  [[nodiscard]] int ranks() const noexcept { return group_.ranks(); }
  [[nodiscard]] comm::PeerGroup& group() noexcept { return group_; }
  [[nodiscard]] device::Device& device() noexcept { return device_; }

  /// Collective: memory that the lanes of all ranks reach.
  [[nodiscard]] std::shared_ptr<comm::PeerMemory> allocate(std::size_t bytes, const std::string& purpose) {
    return group_.lanes().allocate(bytes, purpose);
  }
  /// What this group's ranks see of memory that all ranks' lanes reach.
  [[nodiscard]] std::shared_ptr<comm::PeerMemory> view(std::shared_ptr<comm::PeerMemory> whole) const {
    return group_.view(std::move(whole));
  }
  /// Makes room for what a reduce of at most `shard_bytes` per rank has to keep near. `ledger` outlives us.
  void prepare_staging(int64_t shard_bytes, std::shared_ptr<device::Ledger> ledger);
  /// What moves this model's bytes on `lane`.
  [[nodiscard]] buffer::Route route(device::LaneKind lane);

  /// Raises our counter after the earlier operations of `lane`. `what` is for traces: "ready layers.3".
  void signal(device::LaneKind lane, const std::string& what, int channel, uint32_t sequence);
  /// Later operations of `lane` run after every peer has raised its counter. Our own has reached `sequence`
  /// before, in the lane's order.
  void wait_all(device::LaneKind lane, const std::string& what, int channel, uint32_t sequence);

  /// The group's barrier, of the hosts: what our lanes were given counts only where the host has waited for
  /// it.
  void barrier(const std::string& what);

  /// The ranks read each other's memory: reduces are copies and sums of ours, not collectives.
  [[nodiscard]] bool addressable() const { return group_.lanes().collectives() == nullptr; }
  /// True when the host can read, after a wait, what a peer said before its signal: lanes run inline. Never
  /// of collectives, which read every rank's.
  [[nodiscard]] bool tells_contributions() const noexcept { return tells_; }
  /// Says whether our slot of `group` holds values in its reduce number `sequence`: before that ready signal.
  void set_contributed(int group, uint32_t sequence, bool value);
  /// The ranks whose slot of `group` holds values in reduce `sequence`, in order: after their ready signals.
  /// All ranks when they cannot tell: a slot without contributions then holds zeros.
  [[nodiscard]] std::vector<int> contributors(int group, uint32_t sequence) const;

  /// Between hosts: tells `vote` of `epoch` (1, 2, 3, ...) to all ranks and returns every rank's of the epoch
  /// before, which they told long ago: nobody waits for a slow peer. Empty in the first epoch.
  [[nodiscard]] std::vector<uint64_t> exchange_votes(uint32_t epoch, uint64_t vote);
  /// Collective between hosts: tells `need` to all ranks and returns every rank's.
  [[nodiscard]] std::vector<uint64_t> exchange_needs(uint64_t need);

  /// Gives every rank's number to all: `all` [ranks] gets what each has at `own`, in rank order. Both in the
  /// lanes' memory, on the compute lane.
  void exchange_scalars(const double* own, double* all);

  /// Raises all groups' `published` counters after the earlier operations of `lane`.
  void signal_published(device::LaneKind lane, uint32_t epoch);

 private:
  [[nodiscard]] uint64_t* word(int peer, int index) const;

  comm::PeerGroup& group_;
  device::Device& device_;
  int first_channel_;
  bool tells_;
  std::unique_ptr<comm::LaneSignals> board_;
  std::unique_ptr<comm::SignalBoard> votes_;
  std::vector<std::string> groups_;
  uint32_t needs_ = 0;  // exchanged so far
  uint32_t barriers_ = 0;
  std::shared_ptr<comm::PeerMemory> words_;    // of the hosts; per rank: votes, needs, then 2 per group
  std::shared_ptr<comm::PeerMemory> scalars_;  // of the lanes; two per rank, used in turn
  uint32_t scalar_exchanges_ = 0;
  device::Memory staging_;
};

}  // namespace fsdpp::runtime
