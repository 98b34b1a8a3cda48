#include "fsdpp/nn/embedding.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/sort.h>

#include "fsdpp/device/kernels.h"
#include "fsdpp/nn/initial.h"
#include "fsdpp/nn/sink_capsule.h"
#include "fsdpp/runtime/call.h"
#include "fsdpp/runtime/parameter_group.h"

namespace fsdpp::nn {
namespace {

using runtime::GradSink;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kNoPadding = -1;

// Straight into an fp32 sink. What is read lives until here, on the stream that reads it.
void add_rows_on_gpu(const GradSink& sink, const at::Tensor& indices, const at::Tensor& rows) {
  at::Tensor view = sink.view;
  if (sink.mode == GradSink::Mode::overwrite) view.zero_();
  const bool wider = rows.scalar_type() == at::kDouble;
  const at::Tensor given = (wider ? rows.to(at::kFloat) : rows).contiguous();
  const auto [sorted, order] =
      at::sort(indices.to(at::kLong), /*stable=*/true, /*dim=*/0, /*descending=*/false);
  device::RowGradients gradients{
      .ranks = 1, .dim = view.size(1), .element = runtime::element_of(given.scalar_type())};
  gradients.gradients[0] = given.const_data_ptr();
  gradients.counts[0] = given.size(0);
  device::gpu_kernels().add_rows(
      {view.data_ptr<float>(), 0, view.numel()},
      {sorted.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>(), sorted.numel()}, gradients,
      /*scale=*/1, /*add_to_out=*/true);
}

// Sums of rows in the order of the indices: the same bits every time.
void add_rows(const GradSink& sink, const at::Tensor& indices, const at::Tensor& rows) {
  at::Tensor view = sink.view;
  const bool fp32 = view.scalar_type() == at::kFloat;
  if (fp32 && view.is_cuda() && device::has_gpu_kernels()) {
    add_rows_on_gpu(sink, indices, rows);
    return;
  }
  const at::Tensor wide = rows.to(at::kFloat);
  if (fp32 && !view.is_cuda()) {
    if (sink.mode == GradSink::Mode::overwrite) view.zero_();
    view.index_add_(0, indices, wide);
    return;
  }
  // A sink in bf16 gets sums in fp32. index_add_ on a GPU adds in any order; the dense backward sorts, as it
  // does for an fp32 sink on a GPU where no device of ours has provided kernels.
  const at::Tensor dense = at::embedding_dense_backward(wide, indices, view.size(0), kNoPadding, false);
  if (sink.mode == GradSink::Mode::overwrite) {
    view.copy_(dense);
  } else {
    view.add_(dense);
  }
}

class FusedEmbedding : public torch::autograd::Function<FusedEmbedding> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& indices) {
    keep_owner(*context, "weight", weight);
    context->save_for_backward({indices});
    context->saved_data["rows"] = weight.size(0);
    if (runtime::SinkOwner* owner = kept_owner(*context, "weight");
        owner != nullptr && owner->exchanges_rows()) {
      const auto claim = std::make_shared<runtime::RowClaim>();
      keep(*context, "claim", claim);
      return owner->gather_rows(indices, claim);
    }
    return at::embedding(weight, indices);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined() || !context->needs_input_grad(0)) return {at::Tensor(), at::Tensor()};
    const at::Tensor indices = context->get_saved_variables()[0].reshape({-1});
    const at::Tensor rows = gradients[0].reshape({indices.numel(), gradients[0].size(-1)});
    if (runtime::SinkOwner* owner = kept_owner(*context, "weight")) {
      if (owner->exchanges_rows()) {
        const bool taken = owner->add_rows(indices, rows, *kept<runtime::RowClaim>(*context, "claim"));
        // If not, this is autograd::grad: the gradient is the caller's.
        return {taken ? at::Tensor() : dense_gradient(*context, rows, indices), at::Tensor()};
      }
      if (const auto sink = owner->open()) {
        add_rows(*sink, indices, rows);
        owner->report();
        return {at::Tensor(), at::Tensor()};
      }
    }
    return {dense_gradient(*context, rows, indices), at::Tensor()};
  }

 private:
  static at::Tensor dense_gradient(AutogradContext& context, const at::Tensor& rows,
                                   const at::Tensor& indices) {
    const int64_t count = context.saved_data["rows"].toInt();
    return at::embedding_dense_backward(rows, indices, count, kNoPadding, /*scale_grad_by_freq=*/false);
  }
};

}  // namespace

at::Tensor fused_embedding(const at::Tensor& weight, const at::Tensor& indices) {
  const auto owner = runtime::sink_of(weight);
  if (owner == nullptr) return at::embedding(weight, indices);
  if (at::GradMode::is_enabled()) return FusedEmbedding::apply(weight, indices);
  if (owner->exchanges_rows()) return owner->gather_rows(indices, /*claim=*/nullptr);
  return at::embedding(weight, indices);
}

Embedding::Embedding(int64_t vocabulary, int64_t dim, double deviation, at::Generator& generator,
                     at::ScalarType dtype)
    : weight(register_parameter("weight", normal({vocabulary, dim}, deviation, generator, dtype))) {}

at::Tensor Embedding::look_up(const at::Tensor& indices) const {
  const auto owner = runtime::sink_of(weight);
  if (owner != nullptr && owner->exchanges_rows()) return forward(indices);
  return call_as(*this, [&] { return forward(indices); });
}

}  // namespace fsdpp::nn
