#include "tests/support/deferred_ops.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/support/deferred_numbers.h"

namespace fsdpp::test {
namespace {

using device::Device;
using device::LaneKind;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class Embedding : public torch::autograd::Function<Embedding> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& indices,
                            int64_t lanes) {
    Device& device = *reinterpret_cast<Device*>(lanes);
    keep_device(*context, device);
    nn::keep_owner(*context, "weight", weight);
    context->save_for_backward({indices});
    context->saved_data["rows"] = weight.size(0);
    runtime::SinkOwner* owner = nn::kept_owner(*context, "weight");
    if (owner != nullptr && owner->exchanges_rows()) {
      const auto claim = std::make_shared<runtime::RowClaim>();
      nn::keep(*context, "claim", claim);
      return owner->gather_rows(indices, claim);
    }
    std::vector<int64_t> sizes = indices.sizes().vec();
    const int64_t dim = weight.size(1);
    sizes.push_back(dim);
    at::Tensor out = fresh(sizes);
    const Numbers to(out);
    device.run(LaneKind::compute, "embedding", {{TensorPlace(weight).range()}, {to.range()}},
               [=, from = TensorPlace(weight)] {
                 const auto* ids = indices.data_ptr<int64_t>();
                 for (int64_t i = 0; i < indices.numel(); ++i)
                   std::copy_n(from.data + ids[i] * dim, dim, to.data + i * dim);
               });
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    Device& device = kept_device(*context);
    const at::Tensor indices = context->get_saved_variables()[0].reshape({-1});
    const at::Tensor rows = gradients[0].reshape({indices.numel(), -1});
    runtime::SinkOwner* owner = nn::kept_owner(*context, "weight");
    if (owner != nullptr && owner->exchanges_rows() &&
        owner->add_rows(indices, rows, *nn::kept<runtime::RowClaim>(*context, "claim")))
      return {{}, {}, {}};
    const int64_t dim = rows.size(1);
    const Sink sink = sink_for(owner, {context->saved_data["rows"].toInt(), dim});
    sink.fill(device, "embedding gradient", {Numbers(rows).range()}, [=, from = Numbers(rows)](float* to) {
      const auto* ids = indices.data_ptr<int64_t>();
      for (int64_t i = 0; i < indices.numel(); ++i)
        for (int64_t k = 0; k < dim; ++k) to[ids[i] * dim + k] += from.data[i * dim + k];
    });
    if (!sink.gradient.defined()) owner->report();
    return {sink.gradient, {}, {}};
  }
};

class BoundedLater : public torch::autograd::Function<BoundedLater> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t lanes) {
    Device& device = *reinterpret_cast<Device*>(lanes);
    keep_device(*context, device);
    context->save_for_backward({x});
    at::Tensor result = fresh(x.sizes());
    const Numbers from(x);
    const Numbers to(result);
    device.run(LaneKind::compute, "bounded", {{from.range()}, {to.range()}}, [=] {
      for (int64_t i = 0; i < to.count; ++i)
        to.data[i] = std::isnan(from.data[i]) ? from.data[i]
                                              : std::min(std::floor(std::max(from.data[i], 0.0F)), 3.0F);
    });
    return result;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Numbers x(context->get_saved_variables()[0]);
    at::Tensor result = fresh(gradients[0].sizes());
    const Numbers g(gradients[0]);
    const Numbers to(result);
    kept_device(*context).run(
        LaneKind::compute, "bounded gradient", {{x.range(), g.range()}, {to.range()}}, [=] {
          for (int64_t i = 0; i < to.count; ++i) {
            const float clamped =
                std::isnan(g.data[i]) ? g.data[i] : std::clamp(std::nearbyint(g.data[i]), -2.0F, 2.0F);
            to.data[i] = clamped * (x.data[i] > 0 ? 1.0F : 0.0F);
          }
        });
    return {result, {}};
  }
};

// to = a + b, or a copy of a.
at::Tensor add(Device& device, const char* name, const at::Tensor& a, const at::Tensor& b) {
  at::Tensor result = fresh(a.sizes());
  const Numbers x(a);
  const Numbers y(b.defined() ? b : a);
  const Numbers to(result);
  device.run(LaneKind::compute, name, {{x.range(), y.range()}, {to.range()}}, [=, both = b.defined()] {
    for (int64_t i = 0; i < to.count; ++i) to.data[i] = x.data[i] + (both ? y.data[i] : 0.0F);
  });
  return result;
}

class Fork : public torch::autograd::Function<Fork> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x, int64_t lanes) {
    Device& device = *reinterpret_cast<Device*>(lanes);
    keep_device(*context, device);
    return {add(device, "fork", x, {}), add(device, "fork", x, {})};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {add(kept_device(*context), "fork gradient", gradients[0], gradients[1]), {}};
  }
};

class Sum : public torch::autograd::Function<Sum> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& a, const at::Tensor& b,
                            int64_t lanes) {
    Device& device = *reinterpret_cast<Device*>(lanes);
    keep_device(*context, device);
    return add(device, "sum", a, b);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    Device& device = kept_device(*context);
    return {add(device, "sum gradient", gradients[0], {}), add(device, "sum gradient", gradients[0], {}), {}};
  }
};

class Dot : public torch::autograd::Function<Dot> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& coefficients,
                            int64_t lanes) {
    Device& device = *reinterpret_cast<Device*>(lanes);
    keep_device(*context, device);
    context->save_for_backward({coefficients});
    at::Tensor result = fresh({});
    const Numbers a(x);
    const Numbers b(coefficients);
    const Numbers to(result);
    device.run(LaneKind::compute, "loss", {{a.range(), b.range()}, {to.range()}}, [=] {
      float sum = 0;
      for (int64_t i = 0; i < a.count; ++i) sum += a.data[i] * b.data[i];
      *to.data = sum;
    });
    return result;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor coefficients = context->get_saved_variables()[0];
    at::Tensor result = fresh(coefficients.sizes());
    const Numbers g(gradients[0]);
    const Numbers b(coefficients);
    const Numbers to(result);
    kept_device(*context).run(LaneKind::compute, "loss gradient", {{g.range(), b.range()}, {to.range()}},
                              [=] {
                                for (int64_t i = 0; i < to.count; ++i) to.data[i] = *g.data * b.data[i];
                              });
    return {result, {}, {}};
  }
};

}  // namespace

at::Tensor deferred_embedding(Device& device, const at::Tensor& weight, const at::Tensor& indices) {
  return Embedding::apply(weight, indices, number_of(device));
}

at::Tensor deferred_bounded(Device& device, const at::Tensor& x) {
  return BoundedLater::apply(x, number_of(device));
}

std::pair<at::Tensor, at::Tensor> deferred_fork(Device& device, const at::Tensor& x) {
  const variable_list both = Fork::apply(x, number_of(device));
  return {both[0], both[1]};
}

at::Tensor deferred_sum(Device& device, const at::Tensor& a, const at::Tensor& b) {
  return Sum::apply(a, b, number_of(device));
}

at::Tensor deferred_dot(Device& device, const at::Tensor& x, const at::Tensor& coefficients) {
  return Dot::apply(x, coefficients, number_of(device));
}

}  // namespace fsdpp::test
