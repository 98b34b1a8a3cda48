#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sum.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "fsdpp/nn/linear.h"
#include "fsdpp/nn/recompute.h"
#include "fsdpp/runtime/call.h"

namespace fsdpp::test {

/// Integers in [-range, range] as fp32, a function of `seed` alone.
inline at::Tensor integers(at::IntArrayRef sizes, uint64_t seed, int64_t range = 1) {
  at::Tensor tensor = at::empty(sizes, at::kFloat);
  auto* values = tensor.data_ptr<float>();
  uint64_t state = seed * 0x9E3779B97F4A7C15ULL + 0x632BE59BD9B4E019ULL;
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    values[i] = static_cast<float>(static_cast<int64_t>((state >> 33) % (2 * range + 1)) - range);
  }
  return tensor;
}

/// How a small model computes: `oracle` is libtorch alone, without any code of ours.
enum class Layers { oracle, fused, unfused };

/// A linear layer of the small models, [out, in], with a bias of an odd size class when asked for.
class SmallLinear : public torch::nn::Module {
 public:
  SmallLinear(int64_t in, int64_t out, Layers layers, uint64_t seed, bool biased = true) : layers_(layers) {
    if (biased) bias = register_parameter("bias", integers({out}, seed + 1));
    weight = register_parameter("weight", integers({out, in}, seed));
  }
  /// Another layer on the same weights, computed in another way perhaps.
  SmallLinear(const SmallLinear& tied, Layers layers) : layers_(layers) {
    if (tied.bias.defined()) bias = register_parameter("bias", tied.bias, tied.bias.requires_grad());
    weight = register_parameter("weight", tied.weight, tied.weight.requires_grad());
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& input) const {
    return product(layers_, input, weight, bias);
  }

  static at::Tensor product(Layers layers, const at::Tensor& input, const at::Tensor& weight,
                            const at::Tensor& bias) {
    if (layers == Layers::fused) return nn::fused_linear(input, weight, bias);
    return at::linear(input, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt);
  }

  at::Tensor weight;
  at::Tensor bias;

 private:
  Layers layers_;
};

/// x + down(relu(up(x))): exact on integers.
class SmallBlock : public torch::nn::Module {
 public:
  SmallBlock(int64_t dim, Layers layers, uint64_t seed, bool biased = true)
      : up(register_module("up", std::make_shared<SmallLinear>(dim, dim, layers, seed, biased))),
        down(register_module("down", std::make_shared<SmallLinear>(dim, dim, layers, seed + 100, biased))) {}

  [[nodiscard]] at::Tensor forward(const at::Tensor& input) const {
    if (raises) throw std::runtime_error("the block was told to raise");
    if (on_forward) on_forward();
    const at::Tensor x = casts_input ? input.to(up->weight.scalar_type()) : input;
    const at::Tensor inner = at::relu(up->forward(x));
    return x + (skip_down ? inner : down->forward(inner));
  }

  std::shared_ptr<SmallLinear> up, down;
  std::function<void()> on_forward;
  bool skip_down = false;  // leave the second layer out
  bool raises = false;
  bool casts_input = false;  // to the weights' dtype
};

/// in (root) -> blocks (units) -> out (root).
class SmallNet : public torch::nn::Module {
 public:
  SmallNet(int64_t count, int64_t width, Layers layers, uint64_t seed = 7, bool biased = true)
      : dim(width), kind(layers) {
    first = register_module("first", std::make_shared<SmallLinear>(dim, dim, layers, seed, biased));
    for (int64_t i = 0; i < count; ++i) {
      blocks.push_back(register_module(
          "block" + std::to_string(i),
          std::make_shared<SmallBlock>(dim, layers, seed + 1000 * static_cast<uint64_t>(i + 1), biased)));
    }
    last = register_module("last", std::make_shared<SmallLinear>(dim, dim, layers, seed + 500, biased));
  }

  [[nodiscard]] at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = first->forward(input);
    for (std::size_t step = 0; step < blocks.size(); ++step) {
      const std::size_t i = reversed ? blocks.size() - 1 - step : step;
      if (skipped.count(static_cast<int>(i)) > 0) continue;
      const auto once = [this, i](const at::Tensor& given) { return through(*blocks[i], given); };
      for (int use = 0; use < uses; ++use) x = nn::recompute(recompute, once, x);
      if (static_cast<int>(i) == side_of) side = x;
    }
    return last->forward(x);
  }

  /// `block`'s forward: as a unit of ours, or in the oracle as libtorch does it.
  [[nodiscard]] at::Tensor through(SmallBlock& block, const at::Tensor& input) const {
    return kind == Layers::oracle ? block.forward(input) : fsdpp::call(block, input);
  }
  /// The whole model's forward, likewise.
  [[nodiscard]] at::Tensor run(const at::Tensor& input) {
    return kind == Layers::oracle ? forward(input) : fsdpp::call(*this, input);
  }
  [[nodiscard]] std::vector<std::shared_ptr<torch::nn::Module>> units() const {
    return {blocks.begin(), blocks.end()};
  }

  int64_t dim;
  Layers kind;
  std::shared_ptr<SmallLinear> first, last;
  std::vector<std::shared_ptr<SmallBlock>> blocks;
  std::set<int> skipped;                          // blocks left out of the forward
  bool reversed = false;                          // the blocks in the opposite order
  int uses = 1;                                   // of each block, one after another
  nn::Recompute recompute = nn::Recompute::none;  // of each block
  int side_of = -1;                               // block whose output is kept in `side`
  at::Tensor side;
};

/// The input of `rank`'s microbatch `index`: integers, different for each.
inline at::Tensor small_batch(int64_t dim, int rank, int index = 0, int64_t rows = 3) {
  return integers({rows, dim}, 31 + 17 * static_cast<uint64_t>(rank) + 1009 * static_cast<uint64_t>(index));
}

/// A scalar whose gradient differs between outputs: the sum of integers times outputs.
inline at::Tensor small_loss(const at::Tensor& output) {
  return at::sum(output * integers(output.sizes(), 5));
}

}  // namespace fsdpp::test
