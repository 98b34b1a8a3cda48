#include "tests/support/sharded_integer_model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>

#include <string>

#include "fsdpp/runtime/call.h"

namespace fsdpp::test {

IntegerBlock::IntegerBlock(const IntegerModel& model, at::Generator& generator) {
  first_ = register_module("first", std::make_shared<nn::Linear>(
                                        nn::LinearOptions{model.dim, model.hidden, true}, 1.0, generator));
  second_ = register_module(
      "second", std::make_shared<nn::Linear>(nn::LinearOptions{model.hidden, model.dim}, 1.0, generator));
}

at::Tensor IntegerBlock::forward(const at::Tensor& x) const {
  return bounded(second_->forward(bounded(first_->forward(x))) + x);
}

IntegerNet::IntegerNet(const IntegerModel& model) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(1);
  embedding_ = register_module("embedding",
                               std::make_shared<nn::Embedding>(model.vocabulary, model.dim, 1.0, generator));
  const auto blocks = register_module("blocks", std::make_shared<torch::nn::Module>("blocks"));
  for (int i = 0; i < model.blocks; ++i) {
    blocks_.push_back(
        blocks->register_module(std::to_string(i), std::make_shared<IntegerBlock>(model, generator)));
  }
  if (!model.tied) {
    head_ = register_module(
        "head", std::make_shared<nn::Linear>(nn::LinearOptions{model.dim, model.vocabulary}, 1.0, generator));
  }
  const at::NoGradGuard no_grad;
  auto parameters = named_parameters();
  for (const auto& [name, value] : integer_weights(model)) parameters[name].copy_(value);
}

at::Tensor IntegerNet::forward(const IntegerBatch& batch) const {
  at::Tensor x = bounded(embedding_->look_up(batch.tokens));
  for (const auto& block : blocks_) {
    x = nn::recompute(recompute, [&block](const at::Tensor& input) { return call(*block, input); }, x);
  }
  const auto project = [&] { return nn::fused_linear(x, head_ ? head_->weight : embedding_->weight); };
  const at::Tensor logits = head_ ? project() : call_as(*embedding_, project);  // a tied table may be a unit
  return (logits * batch.coefficients).sum();
}

std::vector<std::shared_ptr<torch::nn::Module>> IntegerNet::units() const {
  return {blocks_.begin(), blocks_.end()};
}

std::vector<runtime::UnitSpec> IntegerNet::units_with_rows() const {
  std::vector<runtime::UnitSpec> units = {
      {{embedding_}, head_ ? runtime::Use::rows : runtime::Use::rows_and_whole}};
  for (const auto& block : blocks_) units.push_back({{block}});
  return units;
}

}  // namespace fsdpp::test
