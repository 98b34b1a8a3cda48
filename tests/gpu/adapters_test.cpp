// Adapters (LoRA) on a frozen base, from ranks that are GPUs: gradients of plain libtorch on the CPU, bit by
// bit.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <iostream>
#include <memory>
#include <string>

#include "fsdpp/base/error.h"
#include "fsdpp/device/cuda.h"
#include "fsdpp/nn/linear.h"
#include "fsdpp/runtime/call.h"
#include "fsdpp/runtime/fully_shard.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/gpu/on_gpus.h"

namespace fsdpp::test {
namespace {

using runtime::Strategy;

constexpr int64_t kDim = 8;
constexpr int64_t kRank = 2;
constexpr int64_t kRows = 16;

// One entry of each row is 1 or -1: whatever two layers make of such numbers, bf16 has it.
at::Tensor one_per_row(at::IntArrayRef sizes, int64_t shift) {
  at::Tensor result = at::zeros(sizes);
  for (int64_t row = 0; row < sizes[0]; ++row)
    result[row][(3 * row + shift) % sizes[1]] = (row + shift) % 2 == 0 ? 1 : -1;
  return result;
}

class Adapted final : public torch::nn::Module {
 public:
  Adapted() {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(1);
    const nn::LinearOptions options{.in = kDim, .out = kDim, .adapter_rank = kRank};
    first = register_module("first", std::make_shared<nn::Linear>(options, 1.0, generator));
    last = register_module("last", std::make_shared<nn::Linear>(options, 1.0, generator));
    const at::NoGradGuard no_grad;
    int64_t shift = 0;
    for (at::Tensor weight : parameters()) weight.copy_(one_per_row(weight.sizes(), shift++));
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& input) const {
    return last->forward(at::relu(call(*first, input)));
  }
  std::shared_ptr<nn::Linear> first, last;
};

void backward(Adapted& net, int rank, int index, const at::TensorOptions& place) {
  const at::Tensor input = one_per_row({kRows, kDim}, rank + 2 * index).to(place);
  const at::Tensor coefficients = one_per_row({kRows, kDim}, rank + index + 1).to(place);
  (call(net, input) * coefficients).sum().backward();
}

bool train(comm::PeerGroup& group, at::ScalarType dtype, const runtime::Options& options) {
  const auto net = std::make_shared<Adapted>();
  const auto model = fully_shard(group, net, {{.modules = {net->first}}}, options,
                                 device::make_cuda_device(group.lanes().gpu(), {.poison = true}));
  Adapted oracle;
  bool right = true;
  for (int step = 0; step < 3; ++step) {
    for (const int index : {2 * step, 2 * step + 1}) {
      const auto scope = model->microbatch(index % 2 == 1);
      backward(*net, group.rank(), index, on(group, dtype));
      model->backward_dw();
      for (int rank = 0; rank < group.ranks(); ++rank) backward(oracle, rank, index, at::kFloat);
    }
    right = same(*model, oracle,
                 text(runtime::to_string(options.strategy), ", ", c10::toString(dtype),
                      options.delay_wgrad ? ", delayed" : "", ", step ", step)) &&
            right;
    model->zero_grad(step % 2 == 0);
    for (at::Tensor weight : oracle.parameters()) weight.mutable_grad().reset();
  }
  return right;
}

const RegisterGpuBody adapters("adapters", [](comm::PeerGroup& group) {
  bool right = true;
  int count = 0;
  for (const Strategy strategy : runtime::kStrategies) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
      for (const bool delayed : {false, true}) {
        runtime::Options options{
            .strategy = strategy, .combine = runtime::Combine::sum, .delay_wgrad = delayed};
        if (dtype != at::kFloat) options.model_dtype = dtype;
        right = train(group, dtype, options) && right;
        ++count;
      }
    }
  }
  if (group.rank() == 0) std::cout << "configurations of adapters " << count << "\n";
  return right;
});

class GpuAdapters : public testing::TestWithParam<int> {};

TEST_P(GpuAdapters, TrainOnAFrozenBase) {
  if (const std::string why = no_gpus_for(GetParam()); !why.empty()) GTEST_SKIP() << why;
  record_figure("parity_configurations", run_on_gpus("adapters", GetParam()), "configurations of adapters ");
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuAdapters, testing::Values(1, 2, 4));

}  // namespace
}  // namespace fsdpp::test
