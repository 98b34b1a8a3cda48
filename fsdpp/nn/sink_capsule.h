#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <string>
#include <utility>

#include "fsdpp/runtime/sink.h"

namespace fsdpp::nn {

/// Carries a weight's sink owner from forward to backward among an autograd function's saved data.
class SinkCapsule final : public torch::jit::CustomClassHolder {
 public:
  explicit SinkCapsule(std::shared_ptr<runtime::SinkOwner> owner) : owner(std::move(owner)) {}
  std::shared_ptr<runtime::SinkOwner> owner;
};

inline void keep_owner(torch::autograd::AutogradContext& context, const std::string& key,
                       const at::Tensor& weight) {
  if (!weight.defined()) return;
  if (auto owner = runtime::sink_of(weight)) {
    context.saved_data[key] = c10::IValue::make_capsule(c10::make_intrusive<SinkCapsule>(std::move(owner)));
  }
}

/// The owner kept under `key`, or null.
inline runtime::SinkOwner* kept_owner(torch::autograd::AutogradContext& context, const std::string& key) {
  const auto found = context.saved_data.find(key);
  if (found == context.saved_data.end()) return nullptr;
  return static_cast<SinkCapsule*>(found->second.toCapsule().get())->owner.get();
}

/// Normal with `deviation` around 0, where `generator` draws (the CPU or a GPU).
[[nodiscard]] at::Tensor normal(at::IntArrayRef sizes, double deviation, at::Generator& generator,
                                at::ScalarType dtype = at::kFloat);

}  // namespace fsdpp::nn
