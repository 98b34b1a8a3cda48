#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/buffer/sharded_buffer.h"
#include "fsdpp/comm/peer_group.h"
#include "fsdpp/device/ledger.h"
#include "fsdpp/runtime/parameter_group.h"
#include "fsdpp/runtime/peers.h"

namespace fsdpp::runtime {

/// Weights that lie sharded over a few neighbouring ranks from a unit's forward on (FSDP2's
/// reshard_after_forward = n; the secondary partition of ZeRO++, Wang et al. 2023): an epoch's first gather
/// in training is from all ranks, and each keeps its part for its neighbours; later ones are from these
/// alone. On the gather lane.
///
/// A rank pulls from its neighbours when it has completed the epoch: has kept its parts of all groups. So
/// will they, whatever units they use in between.
class InnerShards {
 public:
  /// Collective. `size` (a divisor of the ranks of `shard`) neighbours. `groups`: those that have it, among
  /// the model's, whose names by id are `names`. `first_channel`: see Peers.
  InnerShards(comm::PeerGroup& shard, int size, device::Device& device, const std::vector<std::string>& names,
              const std::vector<ParameterGroup*>& groups, int first_channel,
              std::shared_ptr<device::Ledger> ledger);
  ~InnerShards();
  InnerShards(const InnerShards&) = delete;
  InnerShards& operator=(const InnerShards&) = delete;

  /// This rank's part of `group` was kept in `epoch`.
  [[nodiscard]] bool kept(const ParameterGroup& group, uint32_t epoch) const {
    return states_.at(&group).epoch == epoch;
  }
  /// Keeps this rank's part of the weights of `epoch`, which are at `full`; once per epoch. Nobody reads
  /// older ones any more.
  void keep(const ParameterGroup& group, const std::byte* full, uint32_t epoch);
  /// The same from the shards that all ranks have published, which the gather lane may read; false, and
  /// nothing is done, where these are not addressable.
  [[nodiscard]] bool keep_published(const ParameterGroup& group, uint32_t epoch);
  /// All groups have been kept in `epoch`.
  void complete(uint32_t epoch) noexcept { complete_ = epoch; }
  /// Copies the weights of `group` to `full`, if `epoch` is complete; else false, and nothing is done.
  [[nodiscard]] bool gather(const ParameterGroup& group, std::byte* full, uint32_t epoch);

 private:
  struct State {
    buffer::ShardedBuffer parts;
    uint32_t epoch = 0;     // of what is kept
    uint32_t sequence = 0;  // of its signal
  };

  void signal_kept(const ParameterGroup& group, State& state, uint32_t epoch);

  std::unique_ptr<comm::PeerGroup> neighbours_;
  Peers peers_;
  std::shared_ptr<device::Ledger> ledger_;
  std::shared_ptr<comm::PeerMemory> memory_;
  int64_t bytes_ = 0;
  std::map<const ParameterGroup*, State> states_;
  uint32_t complete_ = 0;
};

}  // namespace fsdpp::runtime
