#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "fsdpp/nn/embedding.h"
#include "fsdpp/nn/recompute.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test {

/// Draws that depend on the seed alone.
class Draw {
 public:
  explicit Draw(unsigned seed) : engine_(seed) {}
  [[nodiscard]] int below(int count) { return static_cast<int>(engine_() % static_cast<unsigned>(count)); }
  [[nodiscard]] bool one_in(int count) { return below(count) == 0; }
  template <class T>
  [[nodiscard]] T of(const std::vector<T>& values) {
    return values[static_cast<std::size_t>(below(static_cast<int>(values.size())))];
  }

 private:
  std::mt19937 engine_;
};

/// A model and how it is sharded.
struct RandomConfig {
  int ranks = 2;
  int replicas = 1;
  int64_t dim = 5;
  int uses = 1;  // of each block, one after another
  Layers layers = Layers::fused;
  nn::Recompute recompute = nn::Recompute::none;
  bool biased = true;
  bool extras = false;        // scalars, single elements and none beside the layers
  bool table = false;         // begins with an embedding
  bool rows = false;          // which is exchanged by rows
  bool tied = false;          // the head has the first layer's weight
  bool promised = false;      // every change of weights is told
  std::vector<int> frozen;    // parameters, by number
  bool frozen_block = false;  // all of one block's
  Options options;
  std::vector<runtime::UnitChoice> choices;  // of units in turn
};

[[nodiscard]] RandomConfig random_config(Draw& draw);
[[nodiscard]] std::string describe(const RandomConfig& config);

/// x + down(relu(up(x))) of any inner width.
class RandomBlock : public torch::nn::Module {
 public:
  RandomBlock(const RandomConfig& config, Layers layers, int number);
  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const;

  std::shared_ptr<SmallLinear> up, down;
  at::Tensor scalar, one, none;  // undefined without extras
  bool raises = false;
};

/// A unit without parameters.
class Crossing : public torch::nn::Module {
 public:
  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const { return at::relu(x) - at::relu(-x); }
};

/// Three blocks between a first layer, or a table, and a head; sharded, or the oracle. Integers.
class RandomNet : public torch::nn::Module {
 public:
  static constexpr int kBlocks = 3;

  RandomNet(const RandomConfig& config, bool oracle);
  [[nodiscard]] at::Tensor forward(const at::Tensor& input);
  [[nodiscard]] at::Tensor run(const at::Tensor& input) {
    return oracle_ ? forward(input) : fsdpp::call(*this, input);
  }
  /// What `rank` trains on in `index`: [rows, dim], or [rows, 3] words.
  [[nodiscard]] at::Tensor batch(int rank, int index, int64_t rows = 2) const;
  [[nodiscard]] std::vector<runtime::UnitSpec> units() const;

  std::vector<std::shared_ptr<RandomBlock>> blocks;
  at::Tensor side;               // the first block's output
  int skipped = -1;              // a block that is left out
  bool backward_raises = false;  // half-way

 private:
  [[nodiscard]] at::Tensor begin(const at::Tensor& input) const;
  [[nodiscard]] at::Tensor head(const at::Tensor& x) const;
  [[nodiscard]] at::Tensor through(RandomBlock& block, const at::Tensor& x) const {
    return oracle_ ? block.forward(x) : fsdpp::call(block, x);
  }
  void freeze();

  bool oracle_;
  RandomConfig config_;
  Layers layers_;
  std::shared_ptr<nn::Embedding> table_;
  std::shared_ptr<SmallLinear> first_, last_;
  std::shared_ptr<Crossing> crossing_;
};

}  // namespace fsdpp::test
