#include "fsdpp/nn/embedding.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>

#include "fsdpp/nn/sink_capsule.h"

namespace fsdpp::nn {
namespace {

using runtime::GradSink;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kNoPadding = -1;

class FusedEmbedding : public torch::autograd::Function<FusedEmbedding> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& indices) {
    keep_owner(*context, "weight", weight);
    context->save_for_backward({indices});
    context->saved_data["rows"] = weight.size(0);
    return at::embedding(weight, indices);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined() || !context->needs_input_grad(0)) return {at::Tensor(), at::Tensor()};
    const at::Tensor indices = context->get_saved_variables()[0].reshape({-1});
    const at::Tensor rows = gradients[0].reshape({-1, gradients[0].size(-1)});
    if (runtime::SinkOwner* owner = kept_owner(*context, "weight")) {
      if (const auto sink = owner->open()) {
        at::Tensor view = sink->view;
        if (sink->mode == GradSink::Mode::overwrite) view.zero_();
        view.index_add_(0, indices, rows.to(at::kFloat));  // on the CPU in the order of the indices
        owner->report();
        return {at::Tensor(), at::Tensor()};
      }
    }
    const int64_t count = context->saved_data["rows"].toInt();
    return {at::embedding_dense_backward(rows, indices, count, kNoPadding, /*scale_grad_by_freq=*/false),
            at::Tensor()};
  }
};

}  // namespace

at::Tensor fused_embedding(const at::Tensor& weight, const at::Tensor& indices) {
  if (at::GradMode::is_enabled() && runtime::sink_of(weight) != nullptr)
    return FusedEmbedding::apply(weight, indices);
  return at::embedding(weight, indices);
}

Embedding::Embedding(int64_t vocabulary, int64_t dim, double deviation, at::Generator& generator)
    : weight(register_parameter("weight", normal({vocabulary, dim}, deviation, generator))) {}

}  // namespace fsdpp::nn
