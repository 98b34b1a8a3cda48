// A whole training step as a CUDA graph: what it computes has the bits of the steps run one by one.
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "fsdpp/device/cuda.h"
#include "fsdpp/device/cuda_graph.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/runtime/call.h"
#include "fsdpp/runtime/fully_shard.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/support/integer_model.h"
#include "tests/support/sharded_integer_model.h"

namespace fsdpp::test {
namespace {

constexpr int kEagerSteps = 4;  // until the plans stay what they are
constexpr int kSteps = 5;
constexpr double kLearningRate = 0.01;

// `then`: what is done with the graph at last.
std::vector<at::Tensor> train(comm::PeerGroup& group, runtime::Strategy strategy, bool rows, bool as_graph,
                              const std::function<void(device::CudaStepGraph&, device::Device&)>& then = {}) {
  const at::Device place(at::kCUDA, static_cast<c10::DeviceIndex>(group.lanes().gpu()));
  const IntegerModel model;
  const auto net = std::make_shared<IntegerNet>(model);
  runtime::Options options{.strategy = strategy,
                           .row_exchange_bytes = rows ? 0 : -1,
                           .keep_gathered_bytes = rows ? -1 : 0,
                           .late_group_elements = rows ? 0 : -1};
  options.model_dtype = at::kBFloat16;
  auto lanes = device::make_cuda_device(group.lanes().gpu());
  const auto sharded = rows ? fully_shard(group, net, net->units_with_rows(), options, std::move(lanes))
                            : fully_shard(group, net, net->units(), options, std::move(lanes));
  optim::AdamW optimizer(*sharded, {});
  const IntegerBatch host = integer_batch(model, 0, group.rank());
  const IntegerBatch batch{host.tokens.to(place),
                           host.coefficients.to(at::TensorOptions(place).dtype(at::kBFloat16))};
  const auto step = [&] {
    sharded->zero_grad();
    call(*net, batch).backward();
    optimizer.step(kLearningRate, /*max_norm=*/1.0);
  };
  for (int i = 0; i < kEagerSteps; ++i) step();
  if (!as_graph) {
    for (int i = 0; i < kSteps; ++i) step();
    return sharded->full_weights();
  }
  sharded->device().synchronize();
  group.barrier();
  device::CudaStepGraph graph(step);
  for (int i = 0; i < kSteps; ++i) graph.replay();
  sharded->device().synchronize();
  group.barrier();
  if (then) then(graph, sharded->device());
  return sharded->full_weights();
}

const RegisterGpuBody graph("graph", [](comm::PeerGroup& group) {
  device::use_compute_stream(group.lanes().gpu());
  bool right = true;
  for (const runtime::Strategy strategy : runtime::kStrategies) {
    for (const bool rows : {false, true}) {
      if (rows && !shards_gradients(strategy)) continue;
      const std::vector<at::Tensor> eager = train(group, strategy, rows, false);
      const std::vector<at::Tensor> replayed = train(group, strategy, rows, true);
      for (std::size_t i = 0; i < eager.size(); ++i) {
        if (replayed[i].equal(eager[i])) continue;
        std::cerr << runtime::to_string(strategy) << (rows ? ", rows" : "") << ": weight " << i
                  << " differs\n";
        right = false;
      }
    }
  }
  return right;
});

constexpr int kLost = 4;  // use_cuda_lanes()

const RegisterGpuBody lost("lost_in_a_replay", [](comm::PeerGroup& group) {
  device::use_compute_stream(group.lanes().gpu());
  train(group, runtime::Strategy::optim_grads_params, /*rows=*/false, /*as_graph=*/true,
        [&](device::CudaStepGraph& graph, device::Device& lanes) {
          if (group.rank() == 1) std::_Exit(0);
          graph.replay();
          lanes.synchronize();  // until the watchdog ends this process
        });
  return false;
});

class GpuGraphs : public testing::TestWithParam<int> {};

TEST_P(GpuGraphs, ReplaysHaveTheBitsOfEagerSteps) {
  if (const std::string why = no_gpus_for(GetParam()); !why.empty()) GTEST_SKIP() << why;
  run_on_gpus("graph", GetParam());
}

TEST(GpuGraph, AReplayWhoseRankIsGoneEndsWithItsName) {
  if (const std::string why = no_gpus_for(2); !why.empty()) GTEST_SKIP() << why;
  std::vector<RankProcess> processes = start_ranks("lost_in_a_replay", 2, free_port());
  EXPECT_EQ(processes[1].wait(std::chrono::minutes(2)), 0) << processes[1].output();
  EXPECT_EQ(processes[0].wait(std::chrono::minutes(2)), kLost) << processes[0].output();
  EXPECT_NE(processes[0].output().find("lost rank 1: "), std::string::npos) << processes[0].output();
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuGraphs, testing::Values(1, 2, 4));

}  // namespace
}  // namespace fsdpp::test

int main(int argc, char** argv) { return fsdpp::test::gpu_main(argc, argv); }
