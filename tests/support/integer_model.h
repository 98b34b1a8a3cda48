#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// A model whose training is exact in fp32, and the oracle that trains it: plain libtorch, one process, the
// whole batch, none of our code.
namespace fsdpp::test {

/// Embedding, blocks, head. A block is x -> bounded(second(bounded(first(x))) + x); `first` has a bias,
/// `second` none.
struct IntegerModel {
  int64_t vocabulary = 13;
  int64_t dim = 33;  // rows of 33 and of 5: shards are cut inside rows
  int64_t hidden = 5;
  int blocks = 3;
  bool tied = false;  // the head is the embedding table
};

/// min(floor(relu(x)), 3); its gradient is relu's, rounded and clamped to [-2, 2].
///
/// So activations and the gradients that flow between layers are small integers, and every weight gradient is
/// one: weights stay multiples of one power of two, however deep the model and however many its steps.
[[nodiscard]] at::Tensor bounded(const at::Tensor& x);

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// The first weights, fp32, entries -1, 0 and 1, in the order in which a module would register them:
/// embedding.weight, blocks.I.{first.weight, first.bias, second.weight}, head.weight (untied only).
[[nodiscard]] NamedTensors integer_weights(const IntegerModel& model);

/// What one rank sees in one microbatch. The loss is sum(logits * coefficients).
struct IntegerBatch {
  at::Tensor tokens;        // [2, 3] int64
  at::Tensor coefficients;  // [2, 3, vocabulary] fp32, entries -1, 0 and 1
};
/// The `index`-th piece of the global batch of `step`; all pieces differ.
[[nodiscard]] IntegerBatch integer_batch(const IntegerModel& model, int step, int index);

/// Gradient descent: weight -= rate * (gradient of the whole batch's loss) / divisor.
struct Descent {
  int steps = 0;
  int pieces = 1;   // of the global batch
  int divisor = 1;  // a power of two
  double rate = 1;  // a power of two
};

struct OracleStep {
  double loss = 0;                    // of the whole batch, before the update
  std::vector<at::Tensor> gradients;  // already divided, fp32, ordered as integer_weights()
  std::vector<at::Tensor> weights;    // after the update, fp32
};

/// Trains with fp32 and with fp64 and returns what both agree on.
///
/// Fails the running test (GoogleTest) unless both agree bit for bit, unless every sum's terms and partial
/// sums, in any order, are multiples of one power of two below 2^24 of it, or when a weight has no gradient
/// at all in a step.
[[nodiscard]] std::vector<OracleStep> integer_oracle(const IntegerModel& model, const Descent& descent);

}  // namespace fsdpp::test
