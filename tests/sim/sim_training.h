#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fsdpp/device/sim_picker.h"
#include "fsdpp/runtime/options.h"
#include "tests/support/integer_model.h"
#include "tests/support/schedule.h"

namespace fsdpp::test {

/// What is trained in a simulated world.
struct SimConfig {
  int ranks = 2;
  runtime::Strategy strategy = runtime::Strategy::optim_grads_params;
  int microbatches = 1;
  bool tied = false;
  bool rows = false;  // the embedding is exchanged by rows
  bool fused = true;  // else autograd brings the weight gradients
  int steps = 3;
  bool late = false;     // own rows are added onto the peers' sum
  int replicas = 1;      // of each shard, on a hybrid mesh
  bool parted = false;   // main weights are sharded over the replicas too
  int inner = 0;         // neighbours that keep weights from the forward on; 0: nobody does
  bool by_unit = false;  // units have optim, optim_grads and optim_grads_params in turn

  /// "ranks2-sharded-mb1-untied", unique among sim_configs().
  [[nodiscard]] std::string name() const;
};

/// FSDPP_SIM_SEEDS, or `otherwise`.
[[nodiscard]] uint64_t seeds_asked_for(uint64_t otherwise);

/// Every configuration that the simulation runs.
[[nodiscard]] const std::vector<SimConfig>& sim_configs();

/// The ranks whose shards one after another are the weights.
[[nodiscard]] std::vector<int> owners_in_order(const SimConfig& config);

[[nodiscard]] IntegerModel model_of(const SimConfig& config);
[[nodiscard]] Descent descent_of(const SimConfig& config);

/// The outcome of a training: everything that could differ.
struct Trained {
  std::vector<std::vector<std::vector<float>>> weights;  // per rank and parameter: the shard
  std::vector<std::vector<float>> losses;                // per rank: of each microbatch
  std::vector<uint64_t> read;                            // per rank: see take_weights_read()
};
/// Bit for bit; a NaN equals nothing.
[[nodiscard]] bool same_bits(const Trained& a, const Trained& b);

/// The configuration on HostDevice: every operation at once.
[[nodiscard]] Trained train_serially(const SimConfig& config);

/// How a simulated training differs from a plain one.
struct SimExtras {
  std::function<bool(int rank, const device::Operation&)> dropped;  // operations without effect
  ScheduleRecorder* recorder = nullptr;                             // sees every operation
};
/// The same on SimDevice. `order`, if given, gets a number for the order in which everything ran. Throws
/// SimFailure and whatever the ranks throw.
[[nodiscard]] Trained train_simulated(const SimConfig& config, device::SimOptions options,
                                      const SimExtras& extras = {}, uint64_t* order = nullptr);

/// What is wrong with a simulated training; empty: it is as `expected`.
[[nodiscard]] std::string divergence(const SimConfig& config, device::SimOptions options,
                                     const Trained& expected, const SimExtras& extras = {});

/// The `index`-th seed that tests use, with its policy.
[[nodiscard]] device::SimOptions nth_seed(uint64_t index);

}  // namespace fsdpp::test
