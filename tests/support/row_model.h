#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/randint.h>

#include <memory>

#include "fsdpp/nn/embedding.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test {

/// A table [13, kDim] that may be exchanged by rows, and a layer after it. Integers.
class RowModel : public torch::nn::Module {
 public:
  static constexpr int64_t kDim = 8;
  explicit RowModel(Layers layers) : oracle_(layers == Layers::oracle) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(1);
    table = register_module("table", std::make_shared<nn::Embedding>(13, kDim, 1.0, generator));
    const at::NoGradGuard no_grad;
    table->weight.copy_(integers({13, kDim}, 3));
    last = register_module("last", std::make_shared<SmallLinear>(kDim, kDim, layers, 5));
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& tokens) const {
    return last->forward(oracle_ ? at::embedding(table->weight, tokens) : table->look_up(tokens));
  }
  std::shared_ptr<nn::Embedding> table;
  std::shared_ptr<SmallLinear> last;

 private:
  bool oracle_;
};

/// [count] rows of that table.
inline at::Tensor row_tokens(int rank, int step, int64_t count) {
  const auto seed = static_cast<uint64_t>(100 * step + rank);
  return at::randint(0, 13, {count}, at::make_generator<at::CPUGeneratorImpl>(seed), at::kLong);
}

}  // namespace fsdpp::test
