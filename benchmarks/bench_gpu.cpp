// One row of the GPU benchmark: the Llama of nn/ on this process's GPU, sharded or alone. bench_gpu.py runs
// it, one process per GPU with a launcher's variables, and reads the line of JSON that it prints.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/randint.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fsdpp/comm/connect.h"
#include "fsdpp/comm/cuda.h"
#include "fsdpp/comm/mesh_group.h"
#include "fsdpp/device/cuda.h"
#include "fsdpp/device/cuda_graph.h"
#include "fsdpp/device/cuda_measure.h"
#include "fsdpp/nn/llama.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/runtime/call.h"
#include "fsdpp/runtime/fully_shard.h"
#include "fsdpp/runtime/sink.h"

namespace {

using namespace fsdpp;

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
constexpr double kLearningRate = 1e-5;
constexpr uint64_t kSeed = 1;

struct Arguments {
  std::string row = "ours";
  std::string wgrad = "bf16";
  nn::LlamaConfig model{.rope_theta = 500000, .dtype = at::kBFloat16};
  int64_t sequence = 4096;
  int64_t batch = 1;
  int64_t microbatches = 1;
  int replicas = 1;
  bool parted = false;
  std::string strategy = "optim_grads_params";
  bool optimizer = false;
  std::string recompute = "none";
  bool delay_wgrad = false;
  bool offload = false;
  std::string wire = "fp32";
  double keep_gib = 0;
  int64_t late_elements = runtime::Options{}.late_group_elements;
  double warm_seconds = 3;
  int steps = 10;
  std::string trace;
};

Arguments parse(int argc, char** argv) {
  Arguments a;
  CLI::App app("One row of the GPU benchmark: see bench_gpu.py.");
  app.add_option("--row", a.row)
      ->check(CLI::IsMember({"floor", "ours", "ours-copy", "ours-nccl", "ours-graph"}));
  app.add_option("--wgrad", a.wgrad, "output of the floor's weight gradients")
      ->check(CLI::IsMember({"bf16", "fp32"}));
  app.add_option("--layers", a.model.layers);
  app.add_option("--dim", a.model.dim);
  app.add_option("--ffn", a.model.ffn);
  app.add_option("--heads", a.model.heads);
  app.add_option("--kv-heads", a.model.kv_heads);
  app.add_option("--vocabulary", a.model.vocabulary);
  app.add_option("--sequence", a.sequence);
  app.add_option("--batch", a.batch, "sequences per GPU");
  app.add_option("--microbatches", a.microbatches, "per step, each of so many sequences");
  app.add_option("--strategy", a.strategy, "of ours");
  app.add_option("--replicas", a.replicas, "of ours: of each shard, on a hybrid mesh");
  app.add_flag("--optimizer-over-replicas", a.parted, "of ours: main weights are sharded over replicas too");
  app.add_option("--experts", a.model.experts, "per block; 0: one feed-forward part");
  app.add_option("--active-experts", a.model.active_experts, "of these, per token");
  app.add_option("--adapter-rank", a.model.adapter_rank, "above 0: only adapters of this rank are trained");
  app.add_option("--recompute", a.recompute)->check(CLI::IsMember({"none", "reentrant", "non_reentrant"}));
  app.add_flag("--delay-wgrad", a.delay_wgrad, "of ours");
  app.add_flag("--offload", a.offload, "of ours: main weights and optimizer state in host memory");
  app.add_flag("--optimizer", a.optimizer);
  app.add_option("--wire", a.wire, "of ours: gradients on their way to their owners")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--keep-gib", a.keep_gib,
                 "full weights that stay where they are until the next step's; -1: all");
  app.add_option(
      "--late-elements", a.late_elements,
      "in units of so many elements own rows are added onto the peers' sum; -1: all go through the slots");
  app.add_option("--warm-seconds", a.warm_seconds);
  app.add_option("--steps", a.steps);
  app.add_option("--trace", a.trace,
                 "write two more steps' kernels and copies to this file (Chrome's format)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  a.model.recompute = nn::recompute_from(a.recompute);
  return a;
}

/// The floor's fp32 weight gradients: memory per weight, written by the GEMM, which adds the later
/// microbatches'.
class PlainSink final : public runtime::SinkOwner {
 public:
  explicit PlainSink(const at::Tensor& weight)
      : gradient_(at::empty_like(weight, weight.options().dtype(at::kFloat).requires_grad(false))) {}
  void ensure_resident() override {}
  std::optional<runtime::GradSink> open() override {
    using Mode = runtime::GradSink::Mode;
    return runtime::GradSink{gradient_, written_ ? Mode::add : Mode::overwrite};
  }
  void report() override { written_ = true; }
  void clear() { written_ = false; }

 private:
  bool written_ = false;
  at::Tensor gradient_;
};

/// One row's model and what a step of it does.
class Row {
 public:
  Row(const Arguments& a, comm::PeerGroup& group, int gpu)
      : a_(a), place_(at::kCUDA, static_cast<c10::DeviceIndex>(gpu)) {
    at::Generator generator =
        at::globalContext().getAcceleratorHooksInterface(at::kCUDA).getNewGenerator(place_.index());
    generator.set_current_seed(kSeed);
    model_ = std::make_shared<nn::Llama>(a.model, generator);
    if (a.row == "floor") {
      if (a.model.experts > 0) kernels_ = device::make_cuda_device(gpu);  // for the experts' weight gradients
      if (a.wgrad == "fp32") write_fp32();
    } else {
      runtime::Options options;
      options.strategy = runtime::strategy_from(a.strategy);
      options.fused = a.row != "ours-copy";
      options.delay_wgrad = a.delay_wgrad;
      options.offload = a.offload;
      options.late_group_elements = a.late_elements;
      if (a.wire == "bf16") options.wire_dtype = at::kBFloat16;
      options.keep_gathered_bytes = a.keep_gib < 0 ? -1 : static_cast<int64_t>(a.keep_gib * kGiB);
      options.shard_optimizer_over_replicas = a.parted;
      auto lanes = device::make_cuda_device(gpu);
      if (a.replicas > 1) {
        mesh_ = std::make_unique<comm::MeshGroup>(group, comm::hybrid_mesh(group.ranks(), a.replicas));
        sharded_ = fully_shard(*mesh_, model_, model_->units(), options, std::move(lanes));
      } else {
        sharded_ = fully_shard(group, model_, model_->units(), options, std::move(lanes));
      }
      sharded_->promise_to_tell();  // our AdamW casts and publishes in its kernel: without it weights stay
                                    // published
      if (a.optimizer) optimizer_ = std::make_unique<optim::AdamW>(*sharded_, optim::AdamWOptions{});
    }
    generator.set_current_seed(kSeed + 1 + static_cast<uint64_t>(group.rank()));
    const at::Tensor text = at::randint(0, a.model.vocabulary, {a.batch, a.sequence + 1}, generator,
                                        at::TensorOptions(place_).dtype(at::kLong));
    tokens_ = text.narrow(1, 0, a.sequence).contiguous();
    targets_ = text.narrow(1, 1, a.sequence).contiguous();
    device::cuda_reset_memory();
  }
  ~Row() {
    for (const at::Tensor& weight : model_->parameters()) {
      if (!sharded_) runtime::unregister_sink(weight);
    }
  }

  /// From here on a step is one launch.
  void capture() {
    sharded_->device().synchronize();
    graph_ = std::make_unique<device::CudaStepGraph>([&] { captured_loss_ = eager_step(); });
  }

  at::Tensor step() {
    if (!graph_) return eager_step();
    graph_->replay();
    return captured_loss_;
  }

 private:
  at::Tensor eager_step() {
    clear();
    at::Tensor loss;
    for (int64_t i = 0; i < a_.microbatches; ++i) {
      const auto pass = [&] {
        loss = call(*model_, tokens_, targets_);
        loss.backward();
      };
      if (!sharded_) {
        pass();
        continue;
      }
      const auto scope = sharded_->microbatch(i + 1 == a_.microbatches);
      pass();
      sharded_->backward_dw();
    }
    if (optimizer_) {
      optimizer_->step(kLearningRate);
    } else if (sharded_) {  // as after an optimizer: the next step gathers anew
      sharded_->update_and_publish([] {});
    }
    return loss;
  }

 public:
  [[nodiscard]] int64_t parameters() const {
    int64_t count = 0;
    for (const at::Tensor& weight : model_->parameters()) count += weight.numel();
    return count;
  }
  [[nodiscard]] int64_t tokens() const { return a_.batch * a_.sequence * a_.microbatches; }

 private:
  void clear() {
    if (sharded_) return sharded_->zero_grad();
    for (const at::Tensor& weight : model_->parameters()) weight.mutable_grad().reset();
    for (const auto& sink : sinks_) sink->clear();
  }
  void write_fp32() {
    for (const at::Tensor& weight : model_->parameters()) {
      if (weight.dim() < 2 || !weight.requires_grad()) continue;
      sinks_.push_back(std::make_shared<PlainSink>(weight));
      runtime::register_sink(weight, sinks_.back());
    }
  }

  const Arguments& a_;
  at::Device place_;
  std::shared_ptr<nn::Llama> model_;
  std::unique_ptr<device::Device> kernels_;
  std::vector<std::shared_ptr<PlainSink>> sinks_;
  std::unique_ptr<comm::MeshGroup> mesh_;
  std::shared_ptr<runtime::ShardedModel> sharded_;
  std::unique_ptr<optim::AdamW> optimizer_;
  at::Tensor tokens_, targets_;
  at::Tensor captured_loss_;
  std::unique_ptr<device::CudaStepGraph> graph_;
};

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// What a step needs, known when the first is over: the context, what CUDA's libraries have loaded, the
// runtime's buffers, and of libtorch's allocator what was in use, not what it reserved. Memory is held
// against this plan.
int64_t plan_bytes() {
  const device::CudaMemory after = device::cuda_memory();
  return after.taken - after.reserved + after.allocated;
}

nlohmann::json measure(const Arguments& a, Row& row, comm::PeerGroup& group) {
  group.barrier();
  row.step();
  device::cuda_synchronize();
  const int64_t plan = plan_bytes();
  bool warm = false;
  for (const auto begin = Clock::now(); !warm;) {  // all ranks take the same number of steps
    row.step();
    device::cuda_synchronize();
    const std::vector<double> over =
        group.exchange(std::vector<double>{seconds_since(begin) >= a.warm_seconds ? 1.0 : 0.0});
    warm = over[0] != 0;
  }
  if (a.row == "ours-graph") {
    group.barrier();
    row.capture();
    group.barrier();
    for (int i = 0; i < 3; ++i) row.step();
  }
  std::vector<double> ms, host_ms;
  device::CudaStopwatch stopwatch;
  int64_t taken = 0;
  at::Tensor loss;
  for (int i = 0; i < a.steps; ++i) {
    device::cuda_synchronize();
    group.barrier();
    const auto begin = Clock::now();
    stopwatch.start();
    loss = row.step();
    stopwatch.stop();
    host_ms.push_back(1e3 * seconds_since(begin));
    ms.push_back(stopwatch.milliseconds());
    taken = std::max(taken, device::cuda_memory().taken);
  }
  const device::CudaMemory memory = device::cuda_memory();
  return {{"row", a.row},
          {"rank", group.rank()},
          {"ms", ms},
          {"host_ms", host_ms},
          {"allocated_gib", static_cast<double>(memory.allocated) / kGiB},
          {"reserved_gib", static_cast<double>(memory.reserved) / kGiB},
          {"taken_gib", static_cast<double>(taken) / kGiB},
          {"plan_gib", static_cast<double>(plan) / kGiB},
          {"loss", loss.item<double>()},
          {"parameters", row.parameters()},
          {"tokens", row.tokens()}};
}

void write_trace(const std::string& path, Row& row) {
  namespace profiler = torch::autograd::profiler;
  using torch::profiler::impl::ActivityType;
  const std::set<ActivityType> activities = {ActivityType::CUDA};
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  for (int i = 0; i < 2; ++i) row.step();
  device::cuda_synchronize();
  profiler::disableProfiler()->save(path);
}

void run(const Arguments& a) {
  const auto group = comm::connect(std::chrono::seconds(60));
  const char* local = std::getenv("LOCAL_RANK");
  const int gpu = local != nullptr ? std::atoi(local) : group->rank();
  comm::use_cuda_lanes(*group, gpu,
                       {.via = a.row == "ours-nccl" ? comm::CudaVia::nccl : comm::CudaVia::automatic});
  device::use_compute_stream(gpu);
  device::use_growing_memory();
  nlohmann::json line;
  {
    Row row(a, *group, gpu);
    line = measure(a, row, *group);
    if (!a.trace.empty()) write_trace(a.trace + "." + std::to_string(group->rank()), row);
    group->barrier();
  }
  std::cout << line.dump() + "\n" << std::flush;
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments = parse(argc, argv);
  try {
    run(arguments);
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
  }
  return 1;
}
