#include "fsdpp/nn/cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/max.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <tuple>

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

// log(sum(exp(scores))) per row, [rows, 1], of scores and their log softmax; exact where it counts, at the
// largest score, and so for scores of -infinity too.
at::Tensor log_of_sum(const at::Tensor& scores, const at::Tensor& log_softmax) {
  const auto [largest, where] = at::max(scores, kClasses, /*keepdim=*/true);
  return largest - log_softmax.gather(kClasses, where);
}

class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores, const at::Tensor& targets,
                            int64_t at_a_time) {
    const at::TensorOptions fp32 = scores.options().dtype(at::kFloat);
    at::Tensor sum = at::zeros({}, fp32);
    const at::Tensor norms = at::empty({scores.size(0), 1}, fp32);
    in_pieces(scores, at_a_time, [&](int64_t row, int64_t rows) {
      const at::Tensor piece = scores.narrow(0, row, rows).to(at::kFloat);
      const at::Tensor likely = at::_log_softmax(piece, kClasses, /*half_to_float=*/false);
      sum += at::nll_loss(likely, targets.narrow(0, row, rows), {}, at::Reduction::Sum, kIgnoredTarget);
      norms.narrow(0, row, rows).copy_(log_of_sum(piece, likely));
    });
    const at::Tensor count = targets.ne(kIgnoredTarget).sum().to(at::kFloat);
    context->save_for_backward({scores, targets, norms, count});
    context->saved_data["at_a_time"] = at_a_time;
    return sum / count;
  }

  // (softmax - one at the target) / tokens, rounded once.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto& [scores, targets, norms, count] = std::tie(saved[0], saved[1], saved[2], saved[3]);
    const at::Tensor counts = targets.ne(kIgnoredTarget).unsqueeze(kClasses);
    const at::Tensor chosen = targets.clamp_min(0).unsqueeze(kClasses);
    const at::Tensor each = counts * (gradients[0] / count);
    const at::Tensor minus_one = at::full({1, 1}, -1, norms.options());
    at::Tensor gradient = at::empty_like(scores);
    in_pieces(scores, context->saved_data["at_a_time"].toInt(), [&](int64_t row, int64_t rows) {
      at::Tensor likely = at::sub(scores.narrow(0, row, rows), norms.narrow(0, row, rows)).exp_();
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
