#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "fsdpp/buffer/sharded_buffer.h"
#include "fsdpp/device/ledger.h"
#include "fsdpp/runtime/parameter_group.h"
#include "fsdpp/runtime/partial_gradients.h"
#include "fsdpp/runtime/peers.h"

namespace fsdpp::runtime {

/// Gradient shards of a hybrid mesh, whose ranks along the axis "replicate" hold the same shards: Partial
/// over that axis from a window's first reduce to its last backward, when the replicas' are summed in rank
/// order. Each rank then has its part of the sum (where the optimizer is sharded over replicas too), or all
/// of it.
class ReplicaGradients {
 public:
  /// Collective. `groups`: the trainable ones, which outlive it. `scatter`: each rank gets its part only.
  ReplicaGradients(Peers& replicas, const std::vector<ParameterGroup*>& groups, bool scatter,
                   std::shared_ptr<device::Ledger> ledger);
  ~ReplicaGradients();
  ReplicaGradients(const ReplicaGradients&) = delete;
  ReplicaGradients& operator=(const ReplicaGradients&) = delete;

  /// Where a reduce over the shard axis puts this rank's shard of `group`, `layout.segments(rank)` of it:
  /// added to what the window has, once the peers have read what last lay there. On the reduce lane.
  [[nodiscard]] std::vector<buffer::ReduceTarget> targets(ParameterGroup& group, int rank);
  /// The same for a strategy that adds a window up elsewhere: over what lies here.
  [[nodiscard]] std::vector<buffer::ReduceTarget> overwritten(ParameterGroup& group, int rank);

  /// All of the window has come to `group`'s shard: sums over the replicas. On the reduce lane, collective in
  /// the same order on all ranks; what the compute lane was given before comes first.
  void reduce(ParameterGroup& group);
  /// The compute lane goes on behind all that was summed, and the window is closed: `.grad` is what it will
  /// be.
  void finish();
  /// Throws what targets() of `group` would refuse.
  void check(ParameterGroup& group);
  /// Drops what was refused.
  void forget();
  /// See Reducer.
  [[nodiscard]] const Parameter* partial() const { return partial_.any(); }

  /// This rank's shard of `group`'s gradient, [shard_numel] fp32.
  [[nodiscard]] float* shard(const ParameterGroup& group) const;
  /// What `.grad` of the parameter's shard is while it lies here.
  [[nodiscard]] at::Tensor shown(const Parameter& parameter) const;

 private:
  struct State {
    std::shared_ptr<comm::PeerMemory> memory;
    std::shared_ptr<const layout::ShardLayout> layout;  // of the shard over the replicas
    uint32_t sequence = 0;                              // of the last sum
    bool pulls_awaited = true;                          // what follows is behind everybody's pull of it
  };

  State& state(const ParameterGroup& group) { return states_.at(&group); }
  void await_pulls(device::LaneKind lane, const ParameterGroup& group);
  [[nodiscard]] buffer::ShardedBuffer buffer(const ParameterGroup& group, layout::Placement placement) const;

  Peers& replicas_;
  bool scatter_;
  std::shared_ptr<device::Ledger> ledger_;
  PartialGradients partial_;
  std::map<const ParameterGroup*, State> states_;
  std::vector<ParameterGroup*> summed_;  // since the last finish()
};

}  // namespace fsdpp::runtime
