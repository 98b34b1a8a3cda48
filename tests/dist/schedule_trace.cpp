// Trains a small model under every strategy and writes what rank 0 gave its lanes in one settled step:
//   schedule_trace FOLDER        one FOLDER/<schedule>.json each, read by tools/draw_schedule.py
#include <array>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/comm/mesh_group.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/runtime/fully_shard.h"
#include "fsdpp/trace/recorder.h"
#include "tests/support/small_model_net.h"

namespace fsdpp::test {
namespace {

using device::LaneKind;
using device::Operation;
using device::OperationKind;
using nlohmann::ordered_json;
using runtime::Strategy;

constexpr int kBlocks = 4;
constexpr int kDim = 16;
constexpr int kMicrobatches = 2;
constexpr int kSettled = 3;  // steps: the first is planned from the structure, the second from what was seen

struct Case {
  std::string name;
  Strategy strategy;
  int ranks = 2;
  int replicas = 1;
  bool parted = false;  // the optimizer is sharded over the replicas
};

const std::array<Case, 6> kCases = {{
    {"no_shard", Strategy::no_shard},
    {"optim", Strategy::optim},
    {"optim_grads", Strategy::optim_grads},
    {"optim_grads_params", Strategy::optim_grads_params},
    {"hybrid", Strategy::optim_grads_params, 4, 2},
    {"hybrid_optimizer", Strategy::optim_grads_params, 4, 2, true},
}};

/// One step as the lanes of a rank see it, and where in it the program stood.
class StepTrace {
 public:
  /// From here to stop() the operations of `device` are the step's.
  void start(device::Device& device) {
    marks_.clear();
    device.observe(&recorder_);
  }
  void stop(device::Device& device) { device.unobserve(&recorder_); }
  /// `what` ("forward", "backward", "step") of `microbatch` begins here.
  void mark(const std::string& what, int microbatch) {
    marks_.push_back({{"at", recorder_.operations().size()}, {"what", what}, {"microbatch", microbatch}});
  }
  [[nodiscard]] ordered_json json() const;

 private:
  trace::Recorder recorder_;
  ordered_json marks_ = ordered_json::array();
};

// Positions count from the step's first operation of the lane; an event from before the step is left out: the
// step begins when the one before has ended.
ordered_json StepTrace::json() const {
  std::map<LaneKind, uint64_t> before;
  for (const Operation& operation : recorder_.operations())
    before.try_emplace(operation.lane, operation.position - 1);
  auto operations = ordered_json::array();
  for (const Operation& operation : recorder_.operations()) {
    ordered_json entry = {{"lane", device::to_string(operation.lane)},
                          {"position", operation.position - before[operation.lane]},
                          {"kind", device::to_string(operation.kind)},
                          {"name", operation.name}};
    const device::Event& event = operation.event;
    if (operation.kind == OperationKind::record || operation.kind == OperationKind::wait) {
      const bool inside = before.contains(event.lane) && event.position > before[event.lane];
      if (inside) {
        entry["event"] = {{"lane", device::to_string(event.lane)},
                          {"position", event.position - before[event.lane]}};
      }
    }
    if (operation.channel >= 0) {
      entry["channel"] = operation.channel;
      entry["sequence"] = operation.sequence;
    }
    if (operation.peer >= 0) entry["peer"] = operation.peer;
    operations.push_back(std::move(entry));
  }
  return {{"marks", marks_}, {"operations", operations}};
}

void train(runtime::ShardedModel& model, SmallNet& net, int rank, StepTrace& trace) {
  optim::AdamW optimizer(model, {});
  for (int step = 1; step <= kSettled; ++step) {
    if (step == kSettled) trace.start(model.device());
    for (int microbatch = 0; microbatch < kMicrobatches; ++microbatch) {
      const auto scope = model.microbatch(microbatch + 1 == kMicrobatches);
      trace.mark("forward", microbatch);
      const at::Tensor loss = small_loss(net.run(small_batch(kDim, rank, microbatch)));
      trace.mark("backward", microbatch);
      loss.backward();
    }
    trace.mark("step", kMicrobatches - 1);
    optimizer.step(/*learning_rate=*/0.01);
    model.zero_grad();
  }
  trace.stop(model.device());
}

ordered_json traced(const Case& c) {
  ordered_json result;
  comm::run_thread_ranks(c.ranks, [&](comm::PeerGroup& group) {
    comm::MeshGroup mesh(group, comm::hybrid_mesh(c.ranks, c.replicas));
    const auto net = std::make_shared<SmallNet>(kBlocks, kDim, Layers::fused, /*seed=*/7, /*biased=*/false);
    const runtime::Options options{.strategy = c.strategy, .shard_optimizer_over_replicas = c.parted};
    const auto model = c.replicas > 1 ? fully_shard(mesh, net, net->units(), options)
                                      : fully_shard(group, net, net->units(), options);
    StepTrace trace;
    train(*model, *net, group.rank(), trace);
    if (group.rank() != 0) return;
    auto units = ordered_json::array();
    for (const runtime::UnitReport& unit : model->units()) units.push_back(unit.name);
    result = {{"strategy", runtime::to_string(c.strategy)},
              {"ranks", c.ranks},
              {"replicas", c.replicas},
              {"optimizer_over_replicas", c.parted},
              {"microbatches", kMicrobatches},
              {"units", units}};
    result.update(trace.json());
  });
  return result;
}

void write(const std::filesystem::path& path, const ordered_json& json) {
  std::ofstream file(path);
  file << json.dump(1) << '\n';
  require(file.good(), "cannot write ", path.string());
}

}  // namespace
}  // namespace fsdpp::test

int main(int count, char** arguments) {
  try {
    fsdpp::require(count == 2, "usage: schedule_trace FOLDER");
    const std::filesystem::path folder = arguments[1];
    std::filesystem::create_directories(folder);
    for (const auto& c : fsdpp::test::kCases)
      fsdpp::test::write(folder / (c.name + ".json"), fsdpp::test::traced(c));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "schedule_trace: " << error.what() << '\n';
    return 1;
  }
}
