#include "fsdpp/nn/expert_feed_forward.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/topk.h>

#include <optional>

#include "fsdpp/base/error.h"

namespace fsdpp::nn {

ExpertFeedForward::ExpertFeedForward(const ExpertFeedForwardOptions& options, double deviation,
                                     double down_deviation, at::Generator& generator)
    : options_(options) {
  require(options.active >= 1 && options.active <= options.experts, "ExpertFeedForward: ", options.active,
          " active of ", options.experts, " experts; expected 1 up to all of them");
  router_ = register_module(
      "router", std::make_shared<Linear>(LinearOptions{options.dim, options.experts, false, options.dtype},
                                         deviation, generator));
  const auto make = [&](const char* name, int64_t in, int64_t out, double its) {
    const GroupedLinearOptions layer{options.experts, in, out, options.dtype};
    return register_module(name, std::make_shared<GroupedLinear>(layer, its, generator));
  };
  gate_ = make("gate", options.dim, options.ffn, deviation);
  up_ = make("up", options.dim, options.ffn, deviation);
  down_ = make("down", options.ffn, options.dim, down_deviation);
}

at::Tensor ExpertFeedForward::forward(const at::Tensor& input) const {
  const at::Tensor x = input.reshape({-1, options_.dim});
  const int64_t tokens = x.size(0);
  const auto [scores, chosen] = at::topk(router_->forward(x).to(at::kFloat), options_.active);
  const at::Tensor weights = at::softmax(scores, -1);
  const auto [expert, order] =
      at::sort(chosen.reshape({-1}), /*stable=*/std::optional<bool>(true), /*dim=*/0);
  const at::Tensor offsets = at::searchsorted(expert, at::arange(options_.experts, expert.options()),
                                              /*out_int32=*/true, /*right=*/true);
  // Rows are only permuted, never summed by their index: such sums would come in any order.
  const at::Tensor copies =
      x.unsqueeze(1).expand({tokens, options_.active, options_.dim}).reshape({-1, options_.dim});
  const at::Tensor rows = copies.index_select(0, order);
  const at::Tensor inner = at::silu(gate_->forward(rows, offsets)) * up_->forward(rows, offsets);
  const at::Tensor outputs = down_->forward(inner, offsets);
  const at::Tensor back =
      at::empty_like(order).index_put_({order}, at::arange(order.size(0), order.options()));
  const at::Tensor by_token = outputs.index_select(0, back).view({tokens, options_.active, options_.dim});
  return (by_token * weights.unsqueeze(2).to(by_token.scalar_type())).sum(1).view(input.sizes());
}

}  // namespace fsdpp::nn
