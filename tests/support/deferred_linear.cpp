#include <bit>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "tests/support/deferred_numbers.h"

namespace fsdpp::test {
namespace {

using device::Device;
using device::LaneKind;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Per device; ranks on threads share the table.
struct WeightsRead {
  std::mutex mutex;
  std::map<const Device*, uint64_t> numbers;
};

WeightsRead& weights_read() {
  static WeightsRead all;
  return all;
}

void note_read(const Device& device, const float* weights, int64_t count) {
  const std::lock_guard lock(weights_read().mutex);
  uint64_t& number = weights_read().numbers[&device];
  for (int64_t i = 0; i < count; ++i)
    number = (number ^ std::bit_cast<uint32_t>(weights[i])) * 1099511628211ULL;  // FNV-1a
}

class Linear : public torch::autograd::Function<Linear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, int64_t lanes) {
    Device& device = *reinterpret_cast<Device*>(lanes);
    keep_device(*context, device);
    nn::keep_owner(*context, "weight", weight);
    if (bias) nn::keep_owner(*context, "bias", *bias);
    context->saved_data["biased"] = bias.has_value();
    context->save_for_backward({input, weight});
    std::vector<int64_t> sizes = input.sizes().vec();
    const int64_t in = weight.size(1);
    const int64_t out = sizes.back() = weight.size(0);
    at::Tensor result = fresh(sizes);
    const Numbers x(input);
    const Numbers y(result);
    const TensorPlace w(weight);
    std::vector<ByteRange> reads = {x.range(), w.range()};
    const float* b = nullptr;
    if (bias) {
      b = TensorPlace(*bias).data;
      reads.push_back(TensorPlace(*bias).range());
    }
    device.run(LaneKind::compute, "linear", {std::move(reads), {y.range()}}, [=, &device] {
      note_read(device, w.data, out * in);
      if (b != nullptr) note_read(device, b, out);
      for (int64_t row = 0; row < x.count / in; ++row) {
        for (int64_t o = 0; o < out; ++o) {
          float sum = b == nullptr ? 0 : b[o];
          for (int64_t i = 0; i < in; ++i) sum += x.data[row * in + i] * w.data[o * in + i];
          y.data[row * out + o] = sum;
        }
      }
    });
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    Device& device = kept_device(*context);
    runtime::SinkOwner* owner = nn::kept_owner(*context, "weight");
    if (owner != nullptr) owner->ensure_resident();
    const variable_list saved = context->get_saved_variables();
    variable_list result(4);
    result[0] = input_gradient(device, saved[0], saved[1], gradients[0]);
    result[1] = weight_gradient(device, owner, saved[0], saved[1].sizes(), gradients[0]);
    if (context->saved_data["biased"].toBool())
      result[2] = bias_gradient(device, nn::kept_owner(*context, "bias"), gradients[0]);
    return result;
  }

 private:
  static at::Tensor input_gradient(Device& device, const at::Tensor& input, const at::Tensor& weight,
                                   const at::Tensor& gradient) {
    at::Tensor result = fresh(input.sizes());
    const Numbers g(gradient);
    const Numbers to(result);
    const TensorPlace w(weight);
    const int64_t out = weight.size(0);
    const int64_t in = weight.size(1);
    device.run(LaneKind::compute, "input gradient", {{g.range(), w.range()}, {to.range()}}, [=] {
      std::fill_n(to.data, to.count, 0.0F);
      for (int64_t row = 0; row < g.count / out; ++row)
        for (int64_t o = 0; o < out; ++o)
          for (int64_t i = 0; i < in; ++i)
            to.data[row * in + i] += g.data[row * out + o] * w.data[o * in + i];
    });
    return result;
  }

  static at::Tensor weight_gradient(Device& device, runtime::SinkOwner* owner, const at::Tensor& input,
                                    at::IntArrayRef sizes, const at::Tensor& gradient) {
    const Numbers g(gradient);
    const Numbers x(input);
    const int64_t out = sizes[0];
    const int64_t in = sizes[1];
    const auto add_rows = [=](float* to, float scale, int64_t first, int64_t last) {
      for (int64_t row = 0; row < g.count / out; ++row)
        for (int64_t o = first; o < last; ++o)
          for (int64_t i = 0; i < in; ++i)
            to[(o - first) * in + i] += scale * g.data[row * out + o] * x.data[row * in + i];
    };
    const auto write = [=](const runtime::GradSink& given, int64_t first, int64_t last) {
      const Numbers to(given.view);
      const bool add = given.mode == runtime::GradSink::Mode::add;
      for (int64_t i = 0; i < to.count; ++i)
        to.data[i] = add ? static_cast<float>(given.kept) * to.data[i] : 0.0F;
      add_rows(to.data, static_cast<float>(given.scale), first, last);
    };
    if (owner != nullptr && owner->contribute(write)) return {};
    const Sink sink = sink_for(nullptr, sizes);
    sink.fill(device, "weight gradient", {g.range(), x.range()}, [=](float* to) { add_rows(to, 1, 0, out); });
    return sink.gradient;
  }

  static at::Tensor bias_gradient(Device& device, runtime::SinkOwner* owner, const at::Tensor& gradient) {
    const int64_t out = gradient.size(-1);
    const Sink sink = sink_for(owner, {out});
    sink.fill(device, "bias gradient", {Numbers(gradient).range()}, [=, g = Numbers(gradient)](float* to) {
      for (int64_t i = 0; i < g.count; ++i) to[i % out] += g.data[i];
    });
    if (!sink.gradient.defined()) owner->report();
    return sink.gradient;
  }
};

}  // namespace

uint64_t take_weights_read(const Device& device) {
  const std::lock_guard lock(weights_read().mutex);
  const auto found = weights_read().numbers.extract(&device);
  return found.empty() ? 0 : found.mapped();
}

at::Tensor deferred_linear(Device& device, const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& bias) {
  const std::optional<at::Tensor> given = bias.defined() ? std::optional(bias) : std::nullopt;
  return Linear::apply(input, weight, given, number_of(device));
}

}  // namespace fsdpp::test
