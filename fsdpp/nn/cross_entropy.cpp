#include "fsdpp/nn/cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "fsdpp/base/error.h"

namespace fsdpp::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kClasses = 1;  // the dimension

// Calls work(first row, rows) for each piece.
template <typename Work>
void in_pieces(const at::Tensor& scores, int64_t at_a_time, const Work& work) {
  const int64_t rows = std::max<int64_t>(1, at_a_time / std::max<int64_t>(1, scores.size(kClasses)));
  for (int64_t row = 0; row < scores.size(0); row += rows) work(row, std::min(rows, scores.size(0) - row));
}

class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores, const at::Tensor& targets,
                            int64_t at_a_time) {
    at::Tensor sum = at::zeros({}, scores.options().dtype(at::kFloat));
    in_pieces(scores, at_a_time, [&](int64_t row, int64_t rows) {
      const at::Tensor piece = scores.narrow(0, row, rows).to(at::kFloat);
      sum += at::nll_loss(at::_log_softmax(piece, kClasses, /*half_to_float=*/false),
                          targets.narrow(0, row, rows), {}, at::Reduction::Sum, kIgnoredTarget);
    });
    context->save_for_backward({scores, targets});
    context->saved_data["at_a_time"] = at_a_time;
    return sum / targets.ne(kIgnoredTarget).sum();
  }

  // (softmax - one at the target) / tokens that count, rounded once.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require(!at::GradMode::is_enabled(),
            "the gradient of cross_entropy's gradient was asked for (create_graph); "
            "it has none: use at::cross_entropy_loss");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& scores = saved[0];
    const at::Tensor counts = saved[1].ne(kIgnoredTarget);
    const at::Tensor chosen = saved[1].clamp_min(0).unsqueeze(kClasses);
    // Where none counts all gradients are 0, as in libtorch.
    const at::Tensor each = counts.unsqueeze(kClasses) * (gradients[0] / counts.sum().clamp_min(1));
    const at::Tensor minus_one = at::full({1, 1}, -1, gradients[0].options());
    at::Tensor gradient = at::empty_like(scores);
    in_pieces(scores, context->saved_data["at_a_time"].toInt(), [&](int64_t row, int64_t rows) {
      at::Tensor likely =
          at::_softmax(scores.narrow(0, row, rows).to(at::kFloat), kClasses, /*half_to_float=*/false);
      likely.scatter_add_(kClasses, chosen.narrow(0, row, rows), minus_one.expand({rows, 1}));
      at::Tensor out = gradient.narrow(0, row, rows);
      at::mul_out(out, likely, each.narrow(0, row, rows));
    });
    return {gradient, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor cross_entropy(const at::Tensor& scores, const at::Tensor& targets, int64_t at_a_time) {
  require(scores.dim() == 2 && targets.dim() == 1 && scores.size(0) == targets.size(0), "scores of shape ",
          scores.sizes(), " and targets of shape ", targets.sizes(),
          "; expected [tokens, classes] and [tokens]. Flatten both");
  return CrossEntropy::apply(scores, targets, at_a_time);
}

}  // namespace fsdpp::nn
