#include "fsdpp/optim/device_norm.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "fsdpp/device/kernels.h"

namespace fsdpp::optim {

using device::LaneKind;
using runtime::ShardedModel;

DeviceNorm::DeviceNorm(std::vector<ShardedModel*> models) {
  for (ShardedModel* model : models) {
    const comm::PeerGroup* counted = model->counted();
    const int ranks = counted == nullptr ? 1 : counted->ranks();
    parts_.push_back({model, model->shard_runs(), {}, ranks});
    ranks_ += ranks;
  }
}

// This rank's part of the model's norm, and all ranks' that count.
void DeviceNorm::add_up(Part& part, double norm_type, double* own, double* all) {
  std::vector<device::NormRun> runs;
  device::Access access;
  for (const ShardedModel::ShardRun& shard : part.shards) {
    if (!shard.shard.requires_grad() || !shard.shard.grad().defined() || shard.count == 0) continue;
    if (!shard.counted) continue;
    const auto* gradient = shard.shard.grad().const_data_ptr<float>();
    runs.push_back({gradient, shard.count, 0});
    access.reads.push_back(bytes_at(gradient, shard.count * static_cast<int64_t>(sizeof(float))));
  }
  part.table.send(*part.model, std::move(runs), "table of gradients");
  const bool alone = part.model->counted() == nullptr;
  double* to = alone ? all : own;
  access.writes.push_back(bytes_at(to, sizeof(double)));
  device::Device& device = part.model->device();
  device.run(LaneKind::compute, "norm", std::move(access),
             [=, kernels = device.kernels().optimizer(), runs_on_device = part.table.data(),
              count = part.table.count(), tiles = part.table.tiles, workspace = scratch_.data_ptr<double>()] {
               kernels->norm_part(runs_on_device, count, tiles, norm_type, workspace, to);
             });
  if (!alone) part.model->exchange_scalars(own, all);
}

DeviceNorm::Clip DeviceNorm::clip(double max_norm, double norm_type) {
  const at::TensorOptions place = parts_.front().shards.front().shard.options().requires_grad(false);
  const auto models = static_cast<int64_t>(parts_.size());
  if (!scratch_.defined()) {
    scratch_ = at::empty({device::kNormWorkspace + models + ranks_}, place.dtype(at::kDouble));
    factor_ = at::empty({1}, place.dtype(at::kFloat));
  }
  double* own = scratch_.data_ptr<double>() + device::kNormWorkspace;
  double* all = own + models;
  double* next = all;
  for (Part& part : parts_) {
    add_up(part, norm_type, own++, next);
    next += part.ranks;
  }
  Clip result{at::empty({}, place.dtype(at::kDouble)), factor_.const_data_ptr<float>()};
  device::Device& device = parts_.front().model->device();
  device.run(
      LaneKind::compute, "clip",
      {{bytes_at(all, ranks_ * static_cast<int64_t>(sizeof(double)))},
       {bytes_at(factor_.const_data_ptr(), sizeof(float))}},
      [=, kernels = device.kernels().optimizer(), ranks = ranks_, norm = result.norm, factor = factor_] {
        kernels->clip_factor(all, ranks, norm_type, max_norm, norm.data_ptr<double>(),
                             factor.data_ptr<float>());
      });
  return result;
}

}  // namespace fsdpp::optim
