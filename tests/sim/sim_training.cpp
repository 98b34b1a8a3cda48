#include "tests/sim/sim_training.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/comm/mesh_group.h"
#include "fsdpp/device/host.h"
#include "fsdpp/runtime/call.h"
#include "fsdpp/runtime/fully_shard.h"
#include "tests/support/deferred_model.h"
#include "tests/support/deferred_ops.h"
#include "tests/support/sim_ranks.h"

namespace fsdpp::test {
namespace {

using runtime::Combine;
using runtime::Strategy;

constexpr float kRate = 1.0F / 16;

// For who looks at the schedule: what the host is about to read.
void announce_results(runtime::ShardedModel& model) {
  device::Access access;
  for (const at::Tensor& shard : model.shards())
    access.reads.push_back({shard.const_data_ptr(), shard.nbytes()});
  model.device().announce(device::LaneKind::host, "results", std::move(access));
}

// One rank's training. Numbers are looked at when everything is through.
void train_rank(comm::PeerGroup& group, const SimConfig& config, std::unique_ptr<device::Device> lanes,
                Trained& outcome) {
  const IntegerModel shape = model_of(config);
  const auto net = std::make_shared<DeferredNet>(shape);
  comm::MeshGroup mesh(group, comm::hybrid_mesh(config.ranks, config.replicas));
  const runtime::Options options{
      .strategy = config.strategy,
      .combine = config.ranks == 3 ? Combine::sum : Combine::mean,
      .row_exchange_bytes = config.rows ? 0 : -1,
      .reshard_after_forward = config.inner > 0 ? runtime::Reshard(config.inner) : runtime::Reshard(true),
      .keep_gathered_bytes = config.late ? -1 : 0,
      .late_group_elements = config.late ? 0 : -1,
      .shard_optimizer_over_replicas = config.parted,
      .fused = config.fused};
  std::vector<runtime::UnitSpec> units = net->units(config.rows);
  for (std::size_t unit = 0; config.by_unit && unit < units.size(); ++unit)
    units[unit].choice.strategy = runtime::kStrategies.at(1 + unit % 3);
  const auto model = config.replicas > 1 ? fully_shard(mesh, net, units, options, std::move(lanes))
                                         : fully_shard(group, net, units, options, std::move(lanes));
  device::Device& device = model->device();
  static_cast<void>(take_weights_read(device));  // of an earlier one at the same address
  std::vector<at::Tensor> losses;
  const auto piece = [&](int step, int index) {
    at::Tensor loss = call(*net, device, integer_batch(shape, step, index * config.ranks + group.rank()));
    loss.backward();
    losses.push_back(loss.detach());
  };
  for (int step = 0; step < config.steps; ++step) {
    for (int index = 0; index < config.microbatches; ++index) {
      if (config.microbatches == 1) {  // every backward is a window
        piece(step, index);
        continue;
      }
      const auto scope = model->microbatch(index + 1 == config.microbatches);
      piece(step, index);
    }
    deferred_descent(*model, kRate);
    model->zero_grad();
  }
  device.synchronize();
  announce_results(*model);
  const auto rank = static_cast<std::size_t>(group.rank());
  for (const at::Tensor& loss : losses) outcome.losses[rank].push_back(*loss.const_data_ptr<float>());
  outcome.read[rank] = take_weights_read(device);
  for (const at::Tensor& shard : model->shards()) {
    const auto* first = shard.const_data_ptr<float>();
    outcome.weights[rank].emplace_back(first, first + shard.numel());
  }
  group.barrier();  // peers may read this rank's memory until here
}

Trained empty_outcome(const SimConfig& config) {
  const auto ranks = static_cast<std::size_t>(config.ranks);
  return {std::vector<std::vector<std::vector<float>>>(ranks), std::vector<std::vector<float>>(ranks),
          std::vector<uint64_t>(ranks)};
}

std::vector<SimConfig> make_configs() {
  std::vector<SimConfig> configs;
  for (const int ranks : {2, 3}) {
    for (const int microbatches : {1, 2}) {
      for (const bool tied : {false, true}) {
        for (const Strategy strategy : runtime::kStrategies)
          configs.push_back({ranks, strategy, microbatches, tied});
        configs.push_back({ranks, Strategy::optim_grads_params, microbatches, tied, /*rows=*/true});
        configs.push_back(
            {.ranks = ranks, .microbatches = microbatches, .tied = tied, .rows = tied, .late = true});
      }
      for (const Strategy strategy : runtime::kStrategies)
        configs.push_back({ranks, strategy, microbatches, /*tied=*/false, /*rows=*/false, /*fused=*/false});
    }
  }
  for (const int microbatches : {1, 2}) {
    for (const Strategy strategy : runtime::kStrategies) {
      SimConfig config{.ranks = 4, .strategy = strategy, .microbatches = microbatches, .replicas = 2};
      configs.push_back(config);
      if (!shards_optimizer(strategy)) continue;
      config.parted = true;
      configs.push_back(config);
      if (!shards_parameters(strategy)) continue;
      config.tied = config.rows = config.late = true;
      configs.push_back(config);
    }
  }
  configs.push_back({.ranks = 3, .microbatches = 2, .late = true, .replicas = 3, .parted = true});
  for (const int microbatches : {1, 2}) {
    configs.push_back({.ranks = 4, .microbatches = microbatches, .inner = 2});
    for (const Strategy strategy : runtime::kStrategies) {
      if (!shards_optimizer(strategy)) continue;
      configs.push_back({.ranks = 2, .strategy = strategy, .microbatches = microbatches, .by_unit = true});
    }
  }
  return configs;
}

bool same_floats(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace

uint64_t seeds_asked_for(uint64_t otherwise) {
  const char* const asked = std::getenv("FSDPP_SIM_SEEDS");
  return asked != nullptr ? std::stoull(asked) : otherwise;
}

std::string SimConfig::name() const {
  return text("ranks", ranks, "_", runtime::to_string(strategy), "_mb", microbatches,
              tied ? "_tied" : "_untied", rows ? "_rows" : "", fused ? "" : "_unfused", late ? "_late" : "",
              replicas > 1 ? text("_replicas", replicas) : "", parted ? "_parted" : "",
              inner > 0 ? text("_inner", inner) : "", by_unit ? "_by_unit" : "");
}

std::vector<int> owners_in_order(const SimConfig& config) {
  if (config.strategy == Strategy::no_shard) return {0};
  const int shards = config.ranks / config.replicas;
  std::vector<int> order;
  for (int shard = 0; shard < shards; ++shard) {
    for (int replica = 0; replica < (config.parted ? config.replicas : 1); ++replica)
      order.push_back(replica * shards + shard);
  }
  return order;
}

IntegerModel model_of(const SimConfig& config) { return {.tied = config.tied}; }

Descent descent_of(const SimConfig& config) {
  return {.steps = config.steps,
          .pieces = config.ranks * config.microbatches,
          .divisor = config.ranks == 3 ? 1 : config.ranks,
          .rate = kRate};
}

const std::vector<SimConfig>& sim_configs() {
  static const std::vector<SimConfig> configs = make_configs();
  return configs;
}

bool same_bits(const Trained& a, const Trained& b) {
  for (std::size_t rank = 0; rank < a.weights.size(); ++rank) {
    if (!same_floats(a.losses[rank], b.losses.at(rank)) || a.read[rank] != b.read.at(rank)) return false;
    if (a.weights[rank].size() != b.weights.at(rank).size()) return false;
    for (std::size_t i = 0; i < a.weights[rank].size(); ++i)
      if (!same_floats(a.weights[rank][i], b.weights[rank][i])) return false;
  }
  return true;
}

Trained train_serially(const SimConfig& config) {
  Trained outcome = empty_outcome(config);
  comm::run_thread_ranks(config.ranks, [&](comm::PeerGroup& group) {
    train_rank(group, config, std::make_unique<device::HostDevice>(), outcome);
  });
  return outcome;
}

Trained train_simulated(const SimConfig& config, device::SimOptions options, const SimExtras& extras,
                        uint64_t* order) {
  Trained outcome = empty_outcome(config);
  const uint64_t number =
      run_sim_ranks(config.ranks, options, [&](comm::PeerGroup& group, device::SimWorld& world) {
        auto lanes = std::make_unique<device::SimDevice>(world, group.rank());
        if (extras.dropped) {
          lanes->dropped = [&, rank = group.rank()](const device::Operation& operation) {
            return extras.dropped(rank, operation);
          };
        }
        if (extras.recorder != nullptr) lanes->observe(extras.recorder->observer(group.rank()));
        train_rank(group, config, std::move(lanes), outcome);
      });
  if (order != nullptr) *order = number;
  return outcome;
}

std::string divergence(const SimConfig& config, device::SimOptions options, const Trained& expected,
                       const SimExtras& extras) {
  try {
    return same_bits(train_simulated(config, options, extras), expected) ? "" : "other bits than serially";
  } catch (const std::exception& error) {
    return error.what();
  }
}

device::SimOptions nth_seed(uint64_t index) {
  return {index, static_cast<device::SimPolicy>(index % device::kSimPolicies)};
}

}  // namespace fsdpp::test
