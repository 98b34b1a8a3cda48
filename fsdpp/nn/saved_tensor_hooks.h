#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <functional>
#include <memory>

namespace fsdpp::nn {

/// What to do with a tensor that a forward saves for its backward: makes the hooks of one such tensor.
using SavedTensorHooksMaker = std::function<std::unique_ptr<torch::autograd::SavedVariableHooks>()>;

/// While it lives, tensors that this thread's forwards save go through hooks made by `make`. C++'s
/// torch.autograd.graph.saved_tensors_hooks: libtorch asks its engine for them, and its own engine has none,
/// so one that has takes its place when the program starts. Throws UsageError where another engine is in
/// place (a Python process): use Python's hooks there.
class SavedTensorHooksScope {
 public:
  explicit SavedTensorHooksScope(SavedTensorHooksMaker make);
  ~SavedTensorHooksScope();
  SavedTensorHooksScope(const SavedTensorHooksScope&) = delete;
  SavedTensorHooksScope& operator=(const SavedTensorHooksScope&) = delete;

 private:
  SavedTensorHooksMaker make_;
  const SavedTensorHooksMaker* around_;
};

}  // namespace fsdpp::nn
