#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "fsdpp/optim/device_table.h"

namespace fsdpp::optim {

/// The norm over the gradients of one or several sharded models, and the factor that clips them, on a device
/// with kernels for it: no host waits. See clip_grad_norm().
class DeviceNorm {
 public:
  /// `models` must outlive it, and lie on one device.
  explicit DeviceNorm(std::vector<runtime::ShardedModel*> models);

  /// What the clipping of the gradients as they are does.
  struct Clip {
    at::Tensor norm;      // a double on the device
    const float* factor;  // on the device: valid until the next call
  };
  /// Collective.
  [[nodiscard]] Clip clip(double max_norm, double norm_type);

 private:
  struct Part {
    runtime::ShardedModel* model;
    std::vector<runtime::ShardedModel::ShardRun> shards;
    DeviceTable<device::NormRun> table;
    int ranks;  // whose numbers make the model's norm
  };

  void add_up(Part& part, double norm_type, double* own, double* all);

  std::vector<Part> parts_;
  int ranks_ = 0;       // of all models
  at::Tensor scratch_;  // doubles: workspace, own part of each model, all ranks' parts of each
  at::Tensor factor_;   // fp32
};

}  // namespace fsdpp::optim
