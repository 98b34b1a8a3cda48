#include "fsdpp/nn/grouped_linear.h"

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/device/kernels.h"
#include "fsdpp/nn/initial.h"
#include "fsdpp/nn/sink_capsule.h"
#include "fsdpp/nn/weight_gradient.h"
#include "fsdpp/runtime/parameter_group.h"

namespace fsdpp::nn {
namespace {

using runtime::GradSink;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Rows [begin, end) of each expert, on the host.
template <class Each>
void for_each_group(const at::Tensor& offsets, int64_t first, int64_t last, const Each& each) {
  const at::Tensor ends = offsets.cpu();
  const auto* end = ends.const_data_ptr<int32_t>();
  for (int64_t e = first; e < last; ++e) each(e, e == 0 ? 0 : end[e - 1], end[e]);
}

// [E, out, in] without a copy where the weights lie at equal distances in one storage, as those of one unit
// do.
at::Tensor together(const std::vector<at::Tensor>& weights) {
  if (weights.size() == 1 && weights.front().dim() == 3) return weights.front();
  const at::Tensor& first = weights.front();
  const int64_t step =
      weights.size() == 1 ? first.numel() : weights[1].storage_offset() - first.storage_offset();
  bool even = step >= first.numel();
  for (std::size_t e = 0; e < weights.size(); ++e) {
    even = even && weights[e].is_contiguous() && weights[e].is_alias_of(first) &&
           weights[e].storage_offset() == first.storage_offset() + static_cast<int64_t>(e) * step;
  }
  if (!even) return at::stack(weights);
  return first.as_strided({static_cast<int64_t>(weights.size()), first.size(0), first.size(1)},
                          {step, first.size(1), 1});
}

// input [rows, k] times weights [E, k, out] by group.
at::Tensor product(const at::Tensor& input, const at::Tensor& weights, const at::Tensor& offsets) {
  if (input.is_cuda()) return at::_grouped_mm(input, weights, offsets);
  std::vector<at::Tensor> outputs;
  for_each_group(offsets, 0, weights.size(0), [&](int64_t e, int64_t begin, int64_t end) {
    outputs.push_back(at::mm(input.narrow(0, begin, end - begin), weights[e]));
  });
  return at::cat(outputs);
}

/// What a weight gradient is made of.
struct Factors {
  at::Tensor grad;     // [rows, out]
  at::Tensor input;    // [rows, in]
  at::Tensor offsets;  // [E]
};

// fp32 sinks [out, in] of experts first, first + 1, ..., all by one launch.
void write_on_gpu(const Factors& factors, int64_t first, const std::vector<GradSink>& sinks) {
  std::vector<float*> out;
  std::vector<uint8_t> add;
  for (const GradSink& sink : sinks) {
    out.push_back(sink.view.data_ptr<float>());
    add.push_back(sink.mode == GradSink::Mode::add ? 1 : 0);
  }
  const device::GroupedProduct work{.left = factors.grad.const_data_ptr(),
                                    .right = factors.input.const_data_ptr(),
                                    .element = runtime::element_of(factors.input.scalar_type()),
                                    .offsets = factors.offsets.const_data_ptr<int32_t>(),
                                    .first = static_cast<int>(first),
                                    .groups = static_cast<int>(sinks.size()),
                                    .rows = factors.input.size(0),
                                    .m = factors.grad.size(1),
                                    .n = factors.input.size(1),
                                    .kept = static_cast<float>(sinks.front().kept),
                                    .scale = static_cast<float>(sinks.front().scale)};
  device::gpu_kernels().grouped_products(work, out, add);
}

// Sinks that are not fp32 (a bf16 wire) get their sum from fp32 scratch.
void write_on_gpu_through_scratch(const Factors& factors, int64_t first, const std::vector<GradSink>& sinks) {
  const at::Tensor& view = sinks.front().view;
  const auto count = static_cast<int64_t>(sinks.size());
  const at::Tensor scratch = at::empty({count, view.size(0), view.size(1)}, view.options().dtype(at::kFloat));
  std::vector<GradSink> into;
  for (int64_t e = 0; e < count; ++e) into.push_back({scratch[e], GradSink::Mode::overwrite});
  write_on_gpu(factors, first, into);
  for (int64_t e = 0; e < count; ++e) {
    const GradSink& sink = sinks[static_cast<std::size_t>(e)];
    at::Tensor target = sink.view;
    if (sink.mode == GradSink::Mode::overwrite) {
      target.copy_(scratch[e]);
    } else {
      target.mul_(sink.kept).add_(scratch[e], sink.scale);
    }
  }
}

// The gradients of experts first, first + 1, ... into their sinks.
void write_groups(const Factors& factors, int64_t first, const std::vector<GradSink>& sinks) {
  if (sinks.empty()) return;
  if (factors.input.is_cuda()) {
    const bool fp32 = sinks.front().view.scalar_type() == at::kFloat;
    return fp32 ? write_on_gpu(factors, first, sinks) : write_on_gpu_through_scratch(factors, first, sinks);
  }
  for_each_group(factors.offsets, first, first + static_cast<int64_t>(sinks.size()),
                 [&](int64_t e, int64_t begin, int64_t end) {
                   write_weight_gradient(sinks[static_cast<std::size_t>(e - first)],
                                         factors.grad.narrow(0, begin, end - begin),
                                         factors.input.narrow(0, begin, end - begin));
                 });
}

std::string key_of(int64_t weight) { return "weight" + std::to_string(weight); }

class FusedGroupedLinear : public torch::autograd::Function<FusedGroupedLinear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& offsets,
                            at::TensorList weights) {
    for (std::size_t i = 0; i < weights.size(); ++i)
      keep_owner(*context, key_of(static_cast<int64_t>(i)), weights[i]);
    variable_list saved = {input, offsets};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(saved);
    context->saved_data["weights"] = static_cast<int64_t>(weights.size());
    return product(input, together(weights.vec()).transpose(1, 2), offsets);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const int64_t experts = context->saved_data["weights"].toInt();
    variable_list result(static_cast<std::size_t>(2 + experts));
    if (!gradients[0].defined()) return result;
    require(!at::GradMode::is_enabled(), "grouped_linear has no second derivative (create_graph)");
    bool wanted = false;
    for (int64_t i = 0; i < experts; ++i) {
      wanted = wanted || context->needs_input_grad(static_cast<std::size_t>(2 + i));
      if (runtime::SinkOwner* owner = kept_owner(*context, key_of(i))) owner->ensure_resident();
    }
    const variable_list saved = context->get_saved_variables();
    const std::vector<at::Tensor> weights(saved.begin() + 2, saved.end());
    const Factors factors{gradients[0].to(saved[0].scalar_type()).contiguous(), saved[0].contiguous(),
                          saved[1]};
    if (context->needs_input_grad(0)) result[0] = product(factors.grad, together(weights), factors.offsets);
    if (!wanted) return result;
    if (weights.size() == 1 && weights.front().dim() == 3) {
      result[2] = gradient_of_one(*context, factors, weights.front());
    } else {
      std::size_t first = 0;
      while (first < weights.size()) first = gradients_of_list(*context, factors, weights, first, result);
    }
    return result;
  }

 private:
  // Rows of a weight [E, out, in] are experts.
  static at::Tensor gradient_of_one(AutogradContext& context, const Factors& factors,
                                    const at::Tensor& weight) {
    const auto write = [factors](const GradSink& sink, int64_t first, int64_t last) {
      std::vector<GradSink> sinks;
      for (int64_t e = 0; e < last - first; ++e)
        sinks.push_back({sink.view[e], sink.mode, sink.kept, sink.scale});
      write_groups(factors, first, sinks);
    };
    runtime::SinkOwner* owner = kept_owner(context, key_of(0));
    if (owner != nullptr && owner->contribute(write)) return {};
    at::Tensor own = at::empty(weight.sizes(), weight.options().dtype(at::kFloat));
    write({own, GradSink::Mode::overwrite}, 0, weight.size(0));
    return own.to(weight.scalar_type());
  }

  // Those of experts from `first` on in one launch, up to the first whose weight is among them already: its
  // sink is there when the weight's use before has been reported. Those of weights without a sink go into
  // memory of their own. Returns the first that is left.
  static std::size_t gradients_of_list(AutogradContext& context, const Factors& factors,
                                       const std::vector<at::Tensor>& weights, std::size_t first,
                                       variable_list& result) {
    std::vector<GradSink> sinks;
    std::vector<runtime::SinkOwner*> opened;
    std::size_t e = first;
    for (; e < weights.size(); ++e) {
      runtime::SinkOwner* owner = kept_owner(context, key_of(static_cast<int64_t>(e)));
      if (owner != nullptr && std::find(opened.begin(), opened.end(), owner) != opened.end()) break;
      const bool wanted = context.needs_input_grad(2 + e);
      std::optional<GradSink> sink;
      if (owner != nullptr && wanted) sink = owner->open();
      if (sink) {
        opened.push_back(owner);
        sinks.push_back(*sink);
        continue;
      }
      const at::Tensor own = at::empty(weights[e].sizes(), weights[e].options().dtype(at::kFloat));
      sinks.push_back({own, GradSink::Mode::overwrite});
      if (wanted) result[2 + e] = own;
    }
    write_by_dtype(factors, first, sinks);
    for (runtime::SinkOwner* owner : opened) owner->report();
    for (std::size_t i = first; i < e; ++i) {
      if (result[2 + i].defined()) result[2 + i] = result[2 + i].to(weights[i].scalar_type());
    }
    return e;
  }

  // Runs of sinks with one dtype, which are those of experts `from`, from + 1, ...
  static void write_by_dtype(const Factors& factors, std::size_t from, const std::vector<GradSink>& sinks) {
    std::size_t first = 0;
    while (first < sinks.size()) {
      std::size_t last = first + 1;
      while (last < sinks.size() && sinks[last].view.scalar_type() == sinks[first].view.scalar_type()) ++last;
      write_groups(factors, static_cast<int64_t>(from + first),
                   {sinks.begin() + static_cast<std::ptrdiff_t>(first),
                    sinks.begin() + static_cast<std::ptrdiff_t>(last)});
      first = last;
    }
  }
};

void check(const at::Tensor& input, const std::vector<at::Tensor>& weights, const at::Tensor& offsets) {
  require(!weights.empty() && input.dim() == 2, "grouped_linear: ", weights.size(),
          " weights and an input of ", input.dim(),
          " dimensions; expected at least one weight, and an input [rows, in]");
  const bool one = weights.size() == 1 && weights.front().dim() == 3;
  const int64_t experts = one ? weights.front().size(0) : static_cast<int64_t>(weights.size());
  for (const at::Tensor& weight : weights) {
    require(
        (one || weight.dim() == 2) && weight.sizes() == weights.front().sizes() &&
            weight.size(-1) == input.size(1) && weight.scalar_type() == input.scalar_type(),
        "grouped_linear: a weight ", weight.sizes(), " of ", weight.dtype().name(), " with an input ",
        input.sizes(), " of ", input.dtype().name(),
        "; expected one weight [experts, out, in] or equal ones [out, in], of the input's width and dtype");
  }
  require(offsets.scalar_type() == at::kInt && offsets.dim() == 1 && offsets.size(0) == experts &&
              offsets.is_contiguous() && offsets.device() == input.device(),
          "grouped_linear: offsets ", offsets.sizes(), " of ", offsets.dtype().name(), " on ",
          offsets.device().str(), " for ", experts, " experts; expected one int32 per expert on ",
          input.device().str());
  if (input.is_cuda()) return;  // the host would have to wait
  int64_t before = 0;
  for_each_group(offsets, 0, experts, [&](int64_t e, int64_t /*begin*/, int64_t end) {
    require(end >= before, "grouped_linear: offsets[", e, "] = ", end, " after ", before,
            "; expected each expert's rows to end where, or after, the one's before it do");
    before = end;
  });
  require(before == input.size(0), "grouped_linear: offsets end at ", before, ", but the input has ",
          input.size(0), " rows; expected every row to belong to an expert");
}

at::Tensor run(const at::Tensor& input, const std::vector<at::Tensor>& weights, const at::Tensor& offsets) {
  check(input, weights, offsets);
  return FusedGroupedLinear::apply(input, offsets, at::TensorList(weights));
}

}  // namespace

at::Tensor grouped_linear(const at::Tensor& input, const at::Tensor& weights, const at::Tensor& offsets) {
  return run(input, {weights}, offsets);
}

at::Tensor grouped_linear(const at::Tensor& input, const std::vector<at::Tensor>& weights,
                          const at::Tensor& offsets) {
  return run(input, weights, offsets);
}

GroupedLinear::GroupedLinear(const GroupedLinearOptions& options, double deviation, at::Generator& generator)
    : weight(register_parameter("weight", normal({options.experts, options.out, options.in}, deviation,
                                                 generator, options.dtype))) {}

}  // namespace fsdpp::nn
