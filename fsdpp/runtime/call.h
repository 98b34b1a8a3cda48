#pragma once

#include <exception>
#include <memory>
#include <type_traits>
#include <utility>

#include "fsdpp/runtime/for_each_tensor.h"
#include "fsdpp/runtime/registry.h"
#include "fsdpp/runtime/sharded_model.h"

namespace fsdpp {
namespace runtime {

/// A forward through a module: gathers its unit for as long as it lives, when the module is one.
class ForwardScope {
 public:
  explicit ForwardScope(const torch::nn::Module& module) : ref_(find_unit(module)) {
    if (ref_.model) pass_ = ref_.model->enter(ref_.unit);
  }
  ~ForwardScope() {
    if (!pass_ || finished_) return;
    try {
      ref_.model->finish(pass_, /*raised=*/true);
    } catch (const std::exception&) {  // a lane that failed raised the error that goes by already
      return;
    }
  }
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

  /// The module returned `output`: its tensors get the unit's output dtype, and bring the unit back in
  /// backward.
  template <class Output>
  void finish(Output& output) {
    if (!pass_) return;
    for_each_tensor(output, [&](const at::Tensor& tensor) {
      // Visitors get const tensors; those of `output` are not.
      ref_.model->leave(pass_, const_cast<at::Tensor&>(tensor));
    });
    finish();
  }
  void finish() {
    if (!pass_) return;
    finished_ = true;
    ref_.model->finish(pass_, /*raised=*/false);
  }

 private:
  UnitRef ref_;
  std::shared_ptr<Pass> pass_;
  bool finished_ = false;
};

}  // namespace runtime

/// Runs `body` (a call of any method of `module`) as a forward through `module`'s unit, and returns its
/// result, of which for_each_tensor must find the tensors. For a module that is no unit it just runs `body`.
template <class Module, class Body>
auto call_as(const Module& module, Body&& body) {
  runtime::ForwardScope scope(module);
  if constexpr (std::is_void_v<decltype(body())>) {
    body();
    scope.finish();
  } else {
    auto output = body();
    scope.finish(output);
    return output;
  }
}

/// module.forward(arguments...) with the module's unit gathered. torch::nn has no hooks and parents call
/// forward directly, so this call is where a unit is entered; a bypassed one meets the guard, whose error
/// says so.
template <class Module, class... Arguments>
  requires std::is_base_of_v<torch::nn::Module, Module>
auto call(Module& module, Arguments&&... arguments) {
  return call_as(module, [&] { return module.forward(std::forward<Arguments>(arguments)...); });
}

/// A module that is always entered as a unit: `Unit<Block> block(std::make_shared<Block>(...)); y =
/// block(x);`
template <class Module>
class Unit {
 public:
  explicit Unit(std::shared_ptr<Module> module) : module_(std::move(module)) {}

  template <class... Arguments>
  auto operator()(Arguments&&... arguments) const {
    return call(*module_, std::forward<Arguments>(arguments)...);
  }
  [[nodiscard]] Module* operator->() const noexcept { return module_.get(); }
  [[nodiscard]] Module& operator*() const noexcept { return *module_; }
  [[nodiscard]] const std::shared_ptr<Module>& ptr() const noexcept { return module_; }

 private:
  std::shared_ptr<Module> module_;
};

}  // namespace fsdpp
