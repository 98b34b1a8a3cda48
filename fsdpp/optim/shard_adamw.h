#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "fsdpp/device/memory.h"
#include "fsdpp/device/optimizer_kernels.h"
#include "fsdpp/optim/device_table.h"
#include "fsdpp/runtime/sharded_model.h"

namespace fsdpp::optim {

struct AdamWOptions;

/// AdamW on a device with kernels for it: one pass over this rank's whole shard updates main weights and
/// moments and writes the published weights.
class ShardAdamW {
 public:
  /// Collective. `model` must outlive it.
  ShardAdamW(runtime::ShardedModel& model, const AdamWOptions& options);

  /// Collective: one update of all shards that have a gradient, and their publication. Gradients count as
  /// scaled by `factor`, a number on the device (null: 1).
  void step(double learning_rate, const float* factor);

  [[nodiscard]] int64_t state_bytes() const noexcept {
    return static_cast<int64_t>(first_.bytes() + second_.bytes());
  }

 private:
  /// The shards that are updated with one count of steps and one dtype, as a table on the device.
  struct Table {
    DeviceTable<device::AdamwRun> runs;
    at::Tensor
        step;  // int64 on the device: the number of the update, counted there, so that a graph can go on
  };

  void update(double learning_rate, const float* factor);

  runtime::ShardedModel& model_;
  const AdamWOptions& options_;
  std::vector<runtime::ShardedModel::ShardRun> shards_;
  std::vector<int64_t> offsets_;  // of each shard's moments, elements
  std::vector<int64_t> steps_;    // per shard: updates so far
  device::Memory first_, second_;
  std::map<std::pair<int64_t, at::ScalarType>, Table> tables_;
};

}  // namespace fsdpp::optim
