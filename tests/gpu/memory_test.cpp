// What training holds of a GPU's memory, against what it has in use at worst.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/randint.h>
#include <gtest/gtest.h>

#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/device/cuda.h"
#include "fsdpp/device/cuda_measure.h"
#include "fsdpp/nn/llama.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/runtime/call.h"
#include "fsdpp/runtime/fully_shard.h"
#include "tests/gpu/gpu_ranks.h"

namespace fsdpp::test {
namespace {

using runtime::Strategy;

constexpr int kSteps = 20;
constexpr int kThreads = 8;  // of the offloaded optimizer
constexpr int kSettled = 3;  // after so many steps nothing new is reserved
constexpr double kBound = 1.05;
constexpr int64_t kTokens = 4096;
constexpr int64_t kMiB = 1024 * 1024;

/// One way to train 0.58B parameters; no activation so small that the allocator's steps of 20 MiB show.
struct Way {
  std::string name;
  Strategy strategy = Strategy::optim_grads_params;
  nn::Recompute recompute = nn::Recompute::none;
  bool delay_wgrad = false;
  bool offload = false;
};

const std::vector<Way>& ways() {
  static const std::vector<Way> all = {
      {"parameters", Strategy::optim_grads_params},
      {"gradients", Strategy::optim_grads},
      {"optimizer", Strategy::optim},
      {"nothing", Strategy::no_shard},
      {"recompute", Strategy::optim_grads_params, nn::Recompute::non_reentrant},
      {"reentrant", Strategy::optim_grads_params, nn::Recompute::reentrant},
      {"delayed", Strategy::optim_grads_params, nn::Recompute::none, /*delay_wgrad=*/true},
      {"offload", Strategy::optim_grads_params, nn::Recompute::none, false, /*offload=*/true},
  };
  return all;
}

nn::LlamaConfig shape(const Way& way) {
  return {.vocabulary = 32000,
          .dim = 2048,
          .layers = 8,
          .heads = 16,
          .kv_heads = 8,
          .ffn = 7168,
          .recompute = way.recompute,
          .dtype = at::kBFloat16};
}

struct Held {
  int64_t elsewhere = 0;  // bytes that the runtime has in the GPU: its buffers, the model, AdamW's moments
  device::CudaMemory memory;
  int64_t settled = 0;  // bytes that libtorch's allocator held after kSettled steps

  // What lies elsewhere is in use all the time.
  [[nodiscard]] double ratio() const {
    return static_cast<double>(elsewhere + memory.reserved) /
           static_cast<double>(elsewhere + memory.allocated);
  }
};

int64_t on_gpu(const device::Ledger& ledger) {
  int64_t bytes = 0;
  for (const auto& [purpose, taken] : ledger.by_purpose()) {
    if (!purpose.ends_with("in host memory")) bytes += taken;
  }
  return bytes;
}

Held train(comm::PeerGroup& group, const Way& way) {
  const at::Device place(at::kCUDA, static_cast<c10::DeviceIndex>(group.lanes().gpu()));
  at::Generator generator =
      at::globalContext().getAcceleratorHooksInterface(at::kCUDA).getNewGenerator(place.index());
  const auto model = std::make_shared<nn::Llama>(shape(way), generator);
  runtime::Options options{.strategy = way.strategy};
  options.delay_wgrad = way.delay_wgrad;
  options.offload = way.offload;
  const auto sharded =
      fully_shard(group, model, model->units(), options, device::make_cuda_device(group.lanes().gpu()));
  optim::AdamW optimizer(*sharded, {});
  const at::Tensor text = at::randint(0, shape(way).vocabulary, {1, kTokens + 1}, generator,
                                      at::TensorOptions(place).dtype(at::kLong));
  const at::Tensor tokens = text.narrow(1, 0, kTokens).contiguous();
  const at::Tensor targets = text.narrow(1, 1, kTokens).contiguous();
  device::cuda_reset_memory();
  Held held;
  for (int step = 0; step < kSteps; ++step) {  // the host runs ahead as far as it is let
    sharded->zero_grad();
    call(*model, tokens, targets).backward();
    sharded->backward_dw();
    optimizer.step(1e-5, /*max_norm=*/1.0);
    if (step + 1 == kSettled) held.settled = device::cuda_memory().reserved;
  }
  sharded->device().synchronize();
  held.memory = device::cuda_memory();
  held.elsewhere = on_gpu(sharded->memory());
  group.barrier();
  return held;
}

bool stays_near(comm::PeerGroup& group, const Way& way) {
  const Held held = train(group, way);
  const bool near = held.ratio() < kBound && held.memory.reserved == held.settled;
  if (group.rank() == 0 || !near) {
    std::cout << way.name << ", MiB: elsewhere " << held.elsewhere / kMiB << ", allocated at most "
              << held.memory.allocated / kMiB << ", reserved " << held.memory.reserved / kMiB
              << " (after step " << kSettled << ": " << held.settled / kMiB << "), ratio " << held.ratio()
              << (near ? "" : ": wrong") << "\n";
  }
  return near;
}

const RegisterGpuBody memory("memory", [](comm::PeerGroup& group) {
  device::use_compute_stream(group.lanes().gpu());
  device::use_growing_memory();
  at::set_num_threads(kThreads);
  train(group, ways().front());  // loads what CUDA's libraries load once
  bool right = true;
  for (const Way& way : ways()) right = stays_near(group, way) && right;
  return right;
});

class GpuMemory : public testing::TestWithParam<int> {};

TEST_P(GpuMemory, Case46ReservedStaysNearAllocated) {
  if (const std::string why = no_gpus_for(GetParam()); !why.empty()) GTEST_SKIP() << why;
  std::cout << run_on_gpus("memory", GetParam());
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuMemory, testing::Values(1, 2, 4));

}  // namespace
}  // namespace fsdpp::test
