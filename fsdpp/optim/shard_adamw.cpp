#include "fsdpp/optim/shard_adamw.h"

#include <ATen/ops/full.h>

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
    table.runs.send(model_, std::move(runs), "table of weights");
    device::Access access;
    for (const device::AdamwRun& run : table.runs.runs) {
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
    device.run(LaneKind::compute, "AdamW", std::move(access),
               [=, on_device = table.runs.data(), count = table.runs.count(), tiles = table.runs.tiles,
                element = runtime::element_of(key.second)] {
                 kernels->advance(const_cast<int64_t*>(step.step_counter));
                 kernels->adamw(on_device, count, tiles, element, step);
               });
  }
  tables_ = std::move(tables);
}

void ShardAdamW::step(double learning_rate, const float* factor) {
  const at::NoGradGuard no_grad;
  model_.update_and_publish([&] { update(learning_rate, factor); });
}

}  // namespace fsdpp::optim
