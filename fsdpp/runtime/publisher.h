#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "fsdpp/device/ledger.h"
#include "fsdpp/runtime/options.h"
#include "fsdpp/runtime/parameter_group.h"
#include "fsdpp/runtime/peers.h"

namespace fsdpp::runtime {

/// Makes main weights readable: for peers as published shards (unless all is whole), for the model as its own
/// dtype.
///
/// Peers read only published weights, never memory that an optimizer or a user can write: an optimizer step
/// may start while a slow peer still pulls. The epoch counts publications; all ranks publish the same ones.
class Publisher {
 public:
  /// Collective: allocates the published shards; of `kept`, which are among `groups`, the full weights around
  /// them. `groups` must outlive it.
  /// `replicas`: who has the other parts of this rank's shard of main weights; null: nobody, it has all.
  Publisher(Peers& peers, Peers* replicas, comm::PeerGroup& whole, std::vector<ParameterGroup*> groups,
            const std::vector<ParameterGroup*>& kept, bool offload, std::shared_ptr<device::Ledger> ledger);
  ~Publisher();

  /// Collective: waits until every peer has finished with the last epoch, transforms main weights to model
  /// dtype, and raises the epoch; replicas gather each other's parts.
  ///
  /// With `update` the main weights are updated and transformed by it, on the compute lane, instead.
  /// `complete`: an optimizer may have read the gradients that there are.
  void publish(const std::function<void()>& update, bool complete);

  /// Copies the current epoch of `group` to `full` (full_bytes()) on the gather lane.
  void gather(const ParameterGroup& group, std::byte* full);

  /// Later operations of `lane` see every rank's published shard of `group` in the current epoch.
  void await(device::LaneKind lane, const ParameterGroup& group);

  [[nodiscard]] uint32_t epoch() const noexcept { return epoch_; }  // 0: nothing published yet
  [[nodiscard]] int64_t bytes() const noexcept { return published_bytes_; }
  [[nodiscard]] int64_t kept_bytes() const noexcept { return kept_bytes_; }

 private:
  [[nodiscard]] std::shared_ptr<comm::PeerMemory> allocate(comm::PeerGroup& whole);
  void place(ParameterGroup& group, int64_t offset, bool stays);
  void transform(ParameterGroup& group);
  void send_up(ParameterGroup& group, std::byte* target);
  void release_last();
  void gather_parts();
  void announce_update(const ParameterGroup& group, bool complete);

  Peers& peers_;
  Peers* replicas_;
  std::vector<ParameterGroup*> groups_;
  bool offload_;
  std::shared_ptr<device::Ledger> ledger_;
  std::shared_ptr<comm::PeerMemory> memory_;           // of the ranks that shard
  std::shared_ptr<comm::PeerMemory> replicas_memory_;  // the same, of the replicas
  std::vector<buffer::ShardedBuffer> parts_;           // per group: this rank's shard, cut over the replicas
  int64_t published_bytes_ = 0;                        // of published shards by themselves
  int64_t kept_bytes_ = 0;  // of full weights that stay, with the shards published in them
  /// With main weights in host memory: a group's in model dtype, on their way up.
  struct Staging {
    device::Memory memory;
    std::optional<device::Event> sent;
  };
  std::map<const ParameterGroup*, Staging> staging_;
  uint32_t epoch_ = 0;
  device::Event published_;                       // on the gather lane: our own signals of the epoch
  std::array<std::vector<uint32_t>, 3> awaited_;  // per lane and group id: the epoch known to be published
};

}  // namespace fsdpp::runtime
