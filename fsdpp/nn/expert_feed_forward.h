#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>

#include "fsdpp/nn/grouped_linear.h"
#include "fsdpp/nn/linear.h"

namespace fsdpp::nn {

struct ExpertFeedForwardOptions {
  int64_t dim;  // width of the residual stream
  int64_t ffn;  // width of an expert
  int64_t experts;
  int64_t active;  // experts per token, at most `experts`
  at::ScalarType dtype = at::kFloat;
};

/// SwiGLU experts (Shazeer et al. 2017, "Outrageously Large Neural Networks"): each token goes to the
/// `active` experts with the largest router scores and gets their outputs, weighted by the softmax of these
/// scores:
/// [..., dim] -> [..., dim]. No token is dropped, and no loss balances the experts. On a GPU no number of
/// tokens is read by the host; gradients have the same bits every time.
class ExpertFeedForward : public torch::nn::Module {
 public:
  /// Weights are normal with `deviation`, those of `down` with `down_deviation`. Throws UsageError, naming
  /// the values, unless 1 <= active <= experts.
  ExpertFeedForward(const ExpertFeedForwardOptions& options, double deviation, double down_deviation,
                    at::Generator& generator);
  [[nodiscard]] at::Tensor forward(const at::Tensor& input) const;

 private:
  ExpertFeedForwardOptions options_;
  std::shared_ptr<Linear> router_;
  std::shared_ptr<GroupedLinear> gate_, up_, down_;
};

}  // namespace fsdpp::nn
