#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "fsdpp/device/memory.h"
#include "fsdpp/device/optimizer_kernels.h"
#include "fsdpp/runtime/sharded_model.h"

namespace fsdpp::optim {

struct AdamWOptions;

/// AdamW on a device with kernels for it: one pass over this rank's whole shard updates main weights and
/// moments and writes the published weights. Clipping needs no host: the factor stays on the device.
class ShardAdamW {
 public:
  /// Collective. `model` must outlive it.
  ShardAdamW(runtime::ShardedModel& model, const AdamWOptions& options);

  /// Collective: one update of all shards that have a gradient, and their publication. With `max_norm`
  /// gradients count as scaled to it, see clip_grad_norm(); returns the norm before, a double on the device
  /// (else undefined).
  at::Tensor step(double learning_rate, std::optional<double> max_norm, double norm_type);

  [[nodiscard]] int64_t state_bytes() const noexcept {
    return static_cast<int64_t>(first_.bytes() + second_.bytes());
  }

 private:
  /// The shards that are updated with one count of steps and one dtype, as a table on the device.
  struct Table {
    std::vector<device::AdamwRun> runs;  // as last sent
    device::Memory memory;
    at::Tensor
        step;  // int64 on the device: the number of the update, counted there, so that a graph can go on
    int64_t tiles = 0;
  };
  struct NormTable {
    std::vector<device::NormRun> runs;
    device::Memory memory;
    int64_t tiles = 0;
  };

  const float* clip(double max_norm, double norm_type, at::Tensor& norm);
  void update(double learning_rate, const float* factor);
  template <class Runs>
  void send(Runs& table, decltype(Runs::runs) runs, const char* name);

  runtime::ShardedModel& model_;
  const AdamWOptions& options_;
  std::vector<runtime::ShardedModel::ShardRun> shards_;
  std::vector<int64_t> offsets_;  // of each shard's moments, elements
  std::vector<int64_t> steps_;    // per shard: updates so far
  device::Memory first_, second_;
  std::map<std::pair<int64_t, at::ScalarType>, Table> tables_;
  NormTable norms_;
  at::Tensor scratch_;  // doubles on the device: workspace, own part, all parts, norm
  at::Tensor factor_;   // fp32 on the device
};

}  // namespace fsdpp::optim
