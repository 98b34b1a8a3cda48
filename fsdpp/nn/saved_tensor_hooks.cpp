#include "fsdpp/nn/saved_tensor_hooks.h"

#include <torch/csrc/autograd/engine.h>

#include <mutex>
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

void install() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const Engine& present = Engine::get_default_engine();
  if (typeid(present) == typeid(HookedEngine)) return;
  require(typeid(present) == typeid(Engine),
          "saved-tensor hooks in C++ need libtorch's own autograd engine, but this process has another one "
          "(Python's); use torch.autograd.graph.saved_tensors_hooks, or reentrant recompute");
  torch::autograd::set_default_engine_stub(hooked_engine);
}

}  // namespace

SavedTensorHooksScope::SavedTensorHooksScope(SavedTensorHooksMaker make)
    : make_(std::move(make)), around_(innermost) {
  install();
  innermost = &make_;
}

SavedTensorHooksScope::~SavedTensorHooksScope() { innermost = around_; }

}  // namespace fsdpp::nn
