#pragma once

#include <memory>
#include <span>
#include <vector>

#include "fsdpp/buffer/sharded_buffer.h"
#include "fsdpp/device/ledger.h"
#include "fsdpp/runtime/parameter_group.h"
#include "fsdpp/runtime/peers.h"

namespace fsdpp::runtime {

/// Sums over ranks on their way to gradients that are stored in fewer bits (Options::accumulation_dtype):
/// made in fp32 in memory that all groups use in turn, then rounded once, when they are stored or added. On
/// the reduce lane.
class RoundedSums {
 public:
  /// `groups`: all trainable ones; memory is taken for the largest shard of those whose sums are rounded.
  RoundedSums(Peers& peers, const std::vector<ParameterGroup*>& groups,
              std::shared_ptr<device::Ledger> ledger);

  /// Where a reduce of `group` is to put this rank's shard.
  [[nodiscard]] std::vector<buffer::ReduceTarget> targets(const ParameterGroup& group) const;
  /// From there to `outputs`, which lie in memory of the group's gradient_dtype.
  void store(const ParameterGroup& group, std::span<const buffer::ReduceTarget> outputs);

 private:
  Peers& peers_;
  device::Memory memory_;
};

}  // namespace fsdpp::runtime
