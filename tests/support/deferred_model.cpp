#include "tests/support/deferred_model.h"

#include <string>

#include "fsdpp/runtime/call.h"
#include "tests/support/deferred_ops.h"

namespace fsdpp::test {

using device::Device;
using device::LaneKind;

at::Tensor DeferredBlock::forward(Device& device, const at::Tensor& x) const {
  const auto [inner, around] = deferred_fork(device, x);
  const at::Tensor h = deferred_bounded(device, deferred_linear(device, inner, first, bias));
  return deferred_bounded(device, deferred_sum(device, deferred_linear(device, h, second), around));
}

DeferredNet::DeferredNet(const IntegerModel& model) : torch::nn::Module("net") {
  const NamedTensors values = integer_weights(model);
  std::size_t next = 0;
  const auto take = [&](torch::nn::Module& module, const std::string& name) {
    return module.register_parameter(name, values.at(next++).second.clone());
  };
  embedding_ = register_module("embedding", std::make_shared<Table>());
  embedding_->weight = take(*embedding_, "weight");
  for (int i = 0; i < model.blocks; ++i) {
    const auto block = register_module("block" + std::to_string(i), std::make_shared<DeferredBlock>());
    block->first = take(*block, "first");
    block->bias = take(*block, "bias");
    block->second = take(*block, "second");
    blocks_.push_back(block);
  }
  if (model.tied) return;
  head_ = register_module("head", std::make_shared<Table>());
  head_->weight = take(*head_, "weight");
}

at::Tensor DeferredNet::forward(Device& device, const IntegerBatch& batch) const {
  const bool rows = runtime::find_unit(*embedding_).unit >= 0;
  const auto look_up = [&] { return deferred_embedding(device, embedding_->weight, batch.tokens); };
  at::Tensor x = deferred_bounded(device, look_up());
  for (const auto& block : blocks_) x = call(*block, device, x);
  const auto project = [&] { return deferred_linear(device, x, head_ ? head_->weight : embedding_->weight); };
  const at::Tensor logits = rows && !head_ ? call_as(*embedding_, project) : project();
  return deferred_dot(device, logits, batch.coefficients);
}

std::vector<runtime::UnitSpec> DeferredNet::units(bool rows) const {
  std::vector<runtime::UnitSpec> units;
  if (rows) units.push_back({{embedding_}, head_ ? runtime::Use::rows : runtime::Use::rows_and_whole});
  for (const auto& block : blocks_) units.push_back({{block}});
  return units;
}

// The kernels hold addresses alone, as a device's do: nobody keeps gradients alive for them.
void deferred_descent(runtime::ShardedModel& model, float rate) {
  Device& device = model.device();
  const auto names = model.parameters();
  const std::vector<at::Tensor> shards = model.shards();
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const at::Tensor& gradient = shards[i].grad();
    const int64_t count = shards[i].numel();
    if (count == 0 || !gradient.defined()) continue;
    auto* weight = static_cast<float*>(shards[i].unsafeGetTensorImpl()->mutable_data());
    const auto* slope = static_cast<const float*>(gradient.unsafeGetTensorImpl()->data());
    device.run(LaneKind::compute, "descend " + names[i].first,
               {{floats(weight, count), floats(slope, count)}, {floats(weight, count)}}, [=] {
                 for (int64_t k = 0; k < count; ++k) weight[k] -= rate * slope[k];
               });
  }
}

}  // namespace fsdpp::test
