#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "fsdpp/nn/sink_capsule.h"
#include "tests/support/deferred_ops.h"

// What the deferred operations are made of.
namespace fsdpp::test {

// A tensor's numbers inside an operation. Holds the memory and not the tensor: autograd takes over a gradient
// instead of copying it only when nobody else has it.
struct Numbers {
  explicit Numbers(const at::Tensor& tensor)
      : storage(tensor.storage()),
        data(static_cast<float*>(tensor.unsafeGetTensorImpl()->mutable_data())),
        count(tensor.numel()) {}
  [[nodiscard]] ByteRange range() const { return floats(data, count); }

  c10::Storage storage;
  float* data;
  int64_t count;
};

// A weight's numbers lie where they do at the time of issue: its memory comes and goes.
struct TensorPlace {
  explicit TensorPlace(const at::Tensor& tensor)
      : data(static_cast<const float*>(tensor.unsafeGetTensorImpl()->data())), count(tensor.numel()) {}
  [[nodiscard]] ByteRange range() const { return floats(data, count); }

  const float* data;
  int64_t count;
};

inline at::Tensor fresh(at::IntArrayRef sizes) { return at::empty(sizes, at::kFloat); }

inline void keep_device(torch::autograd::AutogradContext& context, device::Device& device) {
  context.saved_data["device"] = reinterpret_cast<int64_t>(&device);
}
inline device::Device& kept_device(torch::autograd::AutogradContext& context) {
  return *reinterpret_cast<device::Device*>(context.saved_data["device"].toInt());
}

// Where a weight's gradient goes: into the sink of its owner, or to autograd.
struct Sink {
  at::Tensor gradient;  // undefined: fused
  float* data = nullptr;
  int64_t count = 0;
  bool add = false;
  c10::Storage storage;

  template <class Write>  // write(data): adds to what is there
  void fill(device::Device& device, const std::string& name, std::vector<ByteRange> reads,
            Write write) const {
    const ByteRange range = floats(data, count);
    if (add) reads.push_back(range);
    device.run(device::LaneKind::compute, name, {std::move(reads), {range}},
               [=, data = data, count = count, add = add, storage = storage] {
                 if (!add) std::fill_n(data, count, 0.0F);
                 write(data);
               });
  }
};

inline Sink sink_for(runtime::SinkOwner* owner, at::IntArrayRef sizes) {
  Sink sink;
  if (owner != nullptr) {
    if (const auto opened = owner->open()) {
      const Numbers view(opened->view);
      sink.data = view.data;  // the slot's memory is the runtime's: not held here
      sink.count = view.count;
      sink.add = opened->mode == runtime::GradSink::Mode::add;
      return sink;
    }
  }
  sink.gradient = fresh(sizes);
  const Numbers own(sink.gradient);
  sink.storage = own.storage;
  sink.data = own.data;
  sink.count = own.count;
  return sink;
}

// A device among the arguments of an autograd function.
inline int64_t number_of(device::Device& device) { return reinterpret_cast<int64_t>(&device); }

}  // namespace fsdpp::test
