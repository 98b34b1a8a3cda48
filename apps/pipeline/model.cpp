#include "apps/pipeline/model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/sum.h>

#include <string>

namespace fsdpp::pipeline {
namespace {

constexpr int64_t kWidth = 8;
constexpr int64_t kRows = 4;

at::Tensor whole_numbers(at::IntArrayRef sizes, uint64_t seed) {
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randint(-1, 2, sizes, generator, at::TensorOptions().dtype(at::kFloat));
}

}  // namespace

Chunk::Chunk(int index, bool fused) : fused_(fused) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(0);
  for (int layer = 0; layer < 2; ++layer) {
    layers_.push_back(register_module(
        "layer" + std::to_string(layer),
        std::make_shared<nn::Linear>(nn::LinearOptions{kWidth, kWidth, true}, 1.0, generator)));
    const at::NoGradGuard no_grad;
    layers_.back()->weight.copy_(
        whole_numbers({kWidth, kWidth}, static_cast<uint64_t>(100 + 2 * index + layer)));
  }
}

at::Tensor Chunk::forward(const at::Tensor& input) const {
  at::Tensor x = input;
  for (const auto& layer : layers_)
    x = at::clamp(fused_ ? layer->forward(x) : at::linear(x, layer->weight, layer->bias), 0, 3);
  return x;
}

at::Tensor batch(int step, int data_rank, int microbatch) {
  return whole_numbers({kRows, kWidth}, static_cast<uint64_t>(10000 * step + 100 * data_rank + microbatch));
}

at::Tensor loss(const at::Tensor& output) { return at::sum(output * whole_numbers(output.sizes(), 5)); }

void update(const std::vector<at::Tensor>& weights) {
  const at::NoGradGuard no_grad;
  for (at::Tensor weight : weights) {
    if (weight.grad().defined()) weight.sub_(at::sign(weight.grad()));
  }
}

std::vector<at::Tensor> one_process(int steps, int data_ranks, int microbatches) {
  std::vector<std::shared_ptr<Chunk>> model;
  for (int chunk = 0; chunk < kChunks; ++chunk)
    model.push_back(std::make_shared<Chunk>(chunk, /*fused=*/false));
  std::vector<at::Tensor> weights;
  for (const auto& chunk : model) {
    for (const at::Tensor& weight : chunk->parameters()) weights.push_back(weight);
  }
  for (int step = 0; step < steps; ++step) {
    for (int data_rank = 0; data_rank < data_ranks; ++data_rank) {
      for (int m = 0; m < microbatches; ++m) {
        at::Tensor x = batch(step, data_rank, m);
        for (const auto& chunk : model) x = chunk->forward(x);
        loss(x).backward();
      }
    }
    update(weights);
    for (at::Tensor& weight : weights) weight.mutable_grad().reset();
  }
  return weights;
}

}  // namespace fsdpp::pipeline
