#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <string>
#include <utility>

#include "fsdpp/runtime/sink.h"

namespace fsdpp::nn {

/// Carries an object from forward to backward among an autograd function's saved data.
template <class Object>
class Capsule final : public torch::jit::CustomClassHolder {
 public:
  explicit Capsule(std::shared_ptr<Object> held) : object(std::move(held)) {}
  std::shared_ptr<Object> object;
};

template <class Object>
void keep(torch::autograd::AutogradContext& context, const std::string& key, std::shared_ptr<Object> object) {
  context.saved_data[key] =
      c10::IValue::make_capsule(c10::make_intrusive<Capsule<Object>>(std::move(object)));
}

/// The object kept under `key`, or null. `Object` is what keep() was given.
template <class Object>
Object* kept(torch::autograd::AutogradContext& context, const std::string& key) {
  const auto found = context.saved_data.find(key);
  if (found == context.saved_data.end()) return nullptr;
  return static_cast<Capsule<Object>*>(found->second.toCapsule().get())->object.get();
}

/// Keeps the sink owner of `weight`, if it has one.
inline void keep_owner(torch::autograd::AutogradContext& context, const std::string& key,
                       const at::Tensor& weight) {
  if (!weight.defined()) return;
  if (auto owner = runtime::sink_of(weight)) keep(context, key, std::move(owner));
}

/// The owner kept under `key`, or null.
inline runtime::SinkOwner* kept_owner(torch::autograd::AutogradContext& context, const std::string& key) {
  return kept<runtime::SinkOwner>(context, key);
}

}  // namespace fsdpp::nn
