#include "fsdpp/runtime/shard_hooks.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdpp::runtime {

void call_shard_hooks(const std::vector<std::shared_ptr<Parameter>>& parameters) {
  const at::NoGradGuard no_grad;  // as behind an accumulator: a hook may write its leaf
  for (const auto& parameter : parameters) {
    if (!parameter->shard.grad().defined()) continue;
    if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter->shard)) {
      (*hook)(parameter->shard);
    }
  }
}

}  // namespace fsdpp::runtime
