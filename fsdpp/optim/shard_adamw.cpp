#include "fsdpp/optim/shard_adamw.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <cstring>
#include <utility>

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"
#include "fsdpp/device/kernels.h"
#include "fsdpp/optim/adamw.h"

namespace fsdpp::optim {
namespace {

using device::LaneKind;
using ShardRun = runtime::ShardedModel::ShardRun;
constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
constexpr int64_t kMomentAlignment = 64;  // elements: 256 bytes

bool takes_part(const ShardRun& run) { return run.shard.requires_grad() && run.shard.grad().defined(); }

template <class Run>
bool same_bytes(const std::vector<Run>& a, const std::vector<Run>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(Run)) == 0);
}

}  // namespace

ShardAdamW::ShardAdamW(runtime::ShardedModel& model, const AdamWOptions& options)
    : model_(model), options_(options), shards_(model.shard_runs()), steps_(shards_.size()) {
  int64_t elements = 0;
  for (const ShardRun& shard : shards_) {
    offsets_.push_back(elements);
    if (shard.shard.requires_grad()) elements += round_up(shard.count, kMomentAlignment);
  }
  const auto bytes = static_cast<std::size_t>(elements * kFloat);
  first_ = model.device().allocate(bytes, "AdamW moments", model.ledger());
  second_ = model.device().allocate(bytes, "AdamW moments", model.ledger());
}

// The table lies on the device; it is sent again when a gradient has moved.
template <class Runs>
void ShardAdamW::send(Runs& table, decltype(Runs::runs) runs, const char* name) {
  table.tiles = device::place_tiles(std::span(runs));
  if (same_bytes(runs, table.runs)) return;
  const std::size_t bytes = runs.size() * sizeof(runs[0]);
  if (table.memory.bytes() < bytes) {
    model_.device().synchronize();
    table.memory = model_.device().allocate(bytes, "tables of the optimizer", model_.ledger());
  }
  table.runs = std::move(runs);
  model_.device().upload(LaneKind::compute, name, table.memory.data(), table.runs.data(), bytes);
}

const float* ShardAdamW::clip(double max_norm, double norm_type, at::Tensor& norm) {
  std::vector<device::NormRun> runs;
  device::Access access;
  for (const ShardRun& shard : shards_) {
    if (!takes_part(shard) || shard.count == 0) continue;
    const auto* gradient = shard.shard.grad().const_data_ptr<float>();
    runs.push_back({gradient, shard.count, 0});
    access.reads.push_back(bytes_at(gradient, shard.count * kFloat));
  }
  send(norms_, std::move(runs), "table of gradients");
  const int ranks = model_.owners().ranks();
  const at::TensorOptions place = shards_.front().shard.options().requires_grad(false);
  if (!scratch_.defined()) {
    scratch_ = at::empty({device::kNormWorkspace + ranks + 2}, place.dtype(at::kDouble));
    factor_ = at::empty({1}, place.dtype(at::kFloat));
  }
  auto* workspace = scratch_.data_ptr<double>();
  double* own = workspace + device::kNormWorkspace;
  double* parts = own + 1;
  norm = at::empty({}, place.dtype(at::kDouble));
  device::Device& device = model_.device();
  const device::OptimizerKernels* kernels = device.kernels().optimizer();
  access.writes.push_back(bytes_at(own, sizeof(double)));
  const auto count = static_cast<int>(norms_.runs.size());
  const auto* table = reinterpret_cast<const device::NormRun*>(norms_.memory.data());
  device.run(LaneKind::compute, "norm", std::move(access), [=, tiles = norms_.tiles] {
    kernels->norm_part(table, count, tiles, norm_type, workspace, own);
  });
  const bool sharded = shards_optimizer(model_.options().strategy);
  if (sharded) model_.exchange_scalars(own, parts);
  const double* from = sharded ? parts : own;
  device.run(LaneKind::compute, "clip",
             {{bytes_at(from, (sharded ? ranks : 1) * 8)}, {bytes_at(factor_.const_data_ptr(), kFloat)}},
             [=, out = norm, factor = factor_] {
               kernels->clip_factor(from, sharded ? ranks : 1, norm_type, max_norm, out.data_ptr<double>(),
                                    factor.data_ptr<float>());
             });
  return factor_.const_data_ptr<float>();
}

void ShardAdamW::update(double learning_rate, const float* factor) {
  std::map<std::pair<int64_t, at::ScalarType>, std::vector<device::AdamwRun>> wanted;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const ShardRun& shard = shards_[i];
    if (!takes_part(shard)) continue;
    ++steps_[i];
    if (shard.count == 0) continue;
    const at::ScalarType dtype = shard.model == nullptr ? at::kFloat : shard.dtype;
    wanted[{steps_[i], dtype}].push_back({shard.main, shard.shard.grad().const_data_ptr<float>(),
                                          reinterpret_cast<float*>(first_.data()) + offsets_[i],
                                          reinterpret_cast<float*>(second_.data()) + offsets_[i], shard.model,
                                          shard.count, 0});
  }
  device::Device& device = model_.device();
  const device::OptimizerKernels* kernels = device.kernels().optimizer();
  std::map<std::pair<int64_t, at::ScalarType>, Table> tables;
  for (auto& [key, runs] : wanted) {
    Table& table = tables[key];
    if (const auto last = tables_.find({key.first - 1, key.second}); last != tables_.end())
      table = std::move(last->second);
    if (!table.step.defined()) {
      table.step =
          at::full({}, key.first - 1, shards_.front().shard.options().requires_grad(false).dtype(at::kLong));
    }
    send(table, std::move(runs), "table of weights");
    device::Access access;
    for (const device::AdamwRun& run : table.runs) {
      access.reads.push_back(bytes_at(run.gradient, run.count * kFloat));
      for (const float* both : {run.main, run.first, run.second}) {
        access.reads.push_back(bytes_at(both, run.count * kFloat));
        access.writes.push_back(bytes_at(both, run.count * kFloat));
      }
      if (run.model != nullptr) {
        access.writes.push_back(
            bytes_at(run.model, run.count * static_cast<int64_t>(c10::elementSize(key.second))));
      }
    }
    const device::AdamwStep step{.learning_rate = learning_rate,
                                 .beta1 = options_.beta1,
                                 .beta2 = options_.beta2,
                                 .eps = options_.eps,
                                 .weight_decay = options_.weight_decay,
                                 .step_counter = table.step.data_ptr<int64_t>(),
                                 .gradient_factor = factor};
    const auto* on_device = reinterpret_cast<const device::AdamwRun*>(table.memory.data());
    const auto count = static_cast<int>(table.runs.size());
    device.run(LaneKind::compute, "AdamW", std::move(access),
               [=, tiles = table.tiles, element = runtime::element_of(key.second)] {
                 kernels->advance(const_cast<int64_t*>(step.step_counter));
                 kernels->adamw(on_device, count, tiles, element, step);
               });
  }
  tables_ = std::move(tables);
}

at::Tensor ShardAdamW::step(double learning_rate, std::optional<double> max_norm, double norm_type) {
  const at::NoGradGuard no_grad;
  at::Tensor norm;
  const float* factor = max_norm ? clip(*max_norm, norm_type, norm) : nullptr;
  model_.update_and_publish([&] { update(learning_rate, factor); });
  return norm;
}

}  // namespace fsdpp::optim
