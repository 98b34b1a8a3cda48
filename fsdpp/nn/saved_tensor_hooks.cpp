#include "fsdpp/nn/saved_tensor_hooks.h"

#include <torch/csrc/autograd/engine.h>

#include <typeinfo>
#include <utility>

#include "fsdpp/base/error.h"

namespace fsdpp::nn {
namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

thread_local const SavedTensorHooksMaker* innermost = nullptr;

class HookedEngine final : public Engine {
 public:
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    return innermost == nullptr ? nullptr : (*innermost)();
  }
};

Engine& hooked_engine() {
  static HookedEngine engine;
  return engine;
}

// Before any backward: the threads of GPUs are started once in a process, by the first engine that runs.
const bool kInstalled = [] {
  const Engine& present = Engine::get_default_engine();
  if (typeid(present) == typeid(Engine)) torch::autograd::set_default_engine_stub(hooked_engine);
  return true;
}();

void require_installed() {
  const Engine& present = Engine::get_default_engine();
  require(kInstalled && typeid(present) == typeid(HookedEngine),
          "saved-tensor hooks in C++ need libtorch's own autograd engine, but this process has another one "
          "(Python's); use torch.autograd.graph.saved_tensors_hooks, or reentrant recompute");
}

}  // namespace

SavedTensorHooksScope::SavedTensorHooksScope(SavedTensorHooksMaker make)
    : make_(std::move(make)), around_(innermost) {
  require_installed();
  innermost = &make_;
}

SavedTensorHooksScope::~SavedTensorHooksScope() { innermost = around_; }

}  // namespace fsdpp::nn
