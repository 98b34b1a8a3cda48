#include "fsdpp/runtime/parameter_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/runtime/guard.h"

namespace fsdpp::runtime {
namespace {

at::TensorOptions main_options(const ParameterGroup& group) {
  return at::TensorOptions(group.main_place).dtype(group.main_dtype);
}

Elements main_from(const ParameterGroup& group, int64_t element) {
  return {group.main->data() + group.main_bytes(element), group.main_dtype, group.main_place};
}

// The storage keeps whatever it points at alive, also when a view outlives the sharded model.
template <class Owner>
c10::DataPtr owned_pointer(void* data, std::shared_ptr<Owner> owner, at::Device place) {
  auto* context = new std::shared_ptr<Owner>(std::move(owner));
  return {data, context, [](void* held) { delete static_cast<std::shared_ptr<Owner>*>(held); }, place};
}

void point_parameter(const Parameter& parameter, const c10::Storage& storage, int64_t offset,
                     at::ScalarType dtype) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(dispatch_key(storage.device())),
      c10::scalarTypeToTypeMeta(dtype));
  view.unsafeGetTensorImpl()->set_sizes_contiguous(parameter.sizes);
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  parameter.full.set_data(view);
}

void make_shards(ParameterGroup& group) {
  for (const auto& parameter : group.parameters) {
    if (shards_optimizer(group.strategy)) {
      parameter->shard = at::empty({0}, main_options(group));
    } else {
      const Elements main = main_from(group, group.layout->parameter_offset(parameter->index));
      parameter->shard = tensor_over(group.main, main.data, parameter->sizes, main_options(group));
    }
  }
  if (shards_optimizer(group.strategy)) {
    for (const layout::Segment& segment : group.main_layout->segments(group.main_part)) {
      Parameter& parameter = *group.parameters[static_cast<std::size_t>(segment.parameter)];
      parameter.shard_offset = group.main_offset + segment.shard_offset;
      parameter.shard = tensor_over(group.main, main_from(group, segment.shard_offset).data, {segment.count},
                                    main_options(group));
    }
  }
  for (const auto& parameter : group.parameters) {
    parameter->shard.set_requires_grad(group.trainable);
    if (group.trainable && group.gradient_dtype != group.main_dtype)
      parameter->shard.set_grad_dtype(group.gradient_dtype);
  }
}

void copy_main_weights(ParameterGroup& group) {
  const bool sharded = shards_optimizer(group.strategy);
  const int64_t held = sharded ? group.main_numel() : group.layout->full_numel();
  main_from(group, 0).tensor(held).fill_(std::numeric_limits<double>::quiet_NaN());
  for (int part = 0; part < group.main_layout->ranks(); ++part) {
    if (sharded && part != group.main_part) continue;
    const int64_t start = sharded ? 0 : part * group.main_numel();
    for (const layout::Segment& segment : group.main_layout->segments(part)) {
      copy_elements(group.parameters[static_cast<std::size_t>(segment.parameter)]->full,
                    segment.parameter_offset, segment.count, main_from(group, start + segment.shard_offset));
    }
  }
}

}  // namespace

device::Element element_of(at::ScalarType dtype) {
  if (dtype == at::kFloat) return device::Element::fp32;
  if (dtype == at::kBFloat16) return device::Element::bf16;
  require(dtype == at::kHalf, "elements of dtype ", c10::scalarTypeToTypeMeta(dtype).name(),
          "; expected float, bfloat16 or half");
  return device::Element::fp16;
}

at::Tensor tensor_over(std::shared_ptr<void> owner, void* data, at::IntArrayRef sizes,
                       at::TensorOptions options) {
  return at::from_blob(data, sizes, [owner = std::move(owner)](void*) {}, options);
}

at::Tensor Elements::tensor(int64_t count) const {
  return at::from_blob(data, {count}, at::TensorOptions(place).dtype(dtype));
}

void copy_elements(const at::Tensor& parameter, int64_t offset, int64_t count, const Elements& target) {
  target.tensor(count).copy_(parameter.detach().reshape({-1}).narrow(0, offset, count));
}

void cast_elements(const Elements& source, int64_t count, const Elements& target) {
  target.tensor(count).copy_(source.tensor(count));
}

void announce_use(device::Device& device, const char* what, const std::vector<ParameterGroup*>& groups) {
  for (const ParameterGroup* group : groups) {
    device.announce(device::LaneKind::compute, text(what, " ", group->name), {{group->weights_range()}, {}});
  }
}

void ParameterGroup::attach(std::byte* memory) {
  real.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(memory, place));
  for (const auto& parameter : parameters)
    parameter->full.unsafeGetTensorImpl()->set_storage_keep_dtype(real);
}

void ParameterGroup::detach() {
  for (const auto& parameter : parameters)
    parameter->full.unsafeGetTensorImpl()->set_storage_keep_dtype(guard);
  real.unsafeGetStorageImpl()->set_data_ptr_noswap(owned_pointer(forbidden->data(), forbidden, place));
}

void take_over(ParameterGroup& group, bool offload, device::Device& device,
               const std::shared_ptr<device::Ledger>& ledger) {
  const c10::InferenceMode normal(false);  // tensors made in inference mode could never be trained
  const at::NoGradGuard no_grad;
  const bool whole = !shards_optimizer(group.strategy);
  const int64_t held = whole ? group.layout->full_numel() : group.main_numel();
  const auto bytes = static_cast<std::size_t>(group.main_bytes(held));
  group.main_place = offload ? at::Device(at::kCPU) : group.place;
  group.main = std::make_shared<device::Memory>(
      offload ? device.allocate_on_host(bytes, "main weights in host memory", ledger)
              : device.allocate(bytes, "main weights", ledger));
  copy_main_weights(group);
  make_shards(group);

  const std::string message =
      text("weights of unit ", group.name,
           " are not gathered; call its module through fsdpp::call (or fsdpp::Unit), "
           "give optimizers shards() instead of parameters(), and take full copies with full_weights()");
  group.guard = make_guard_storage(group.full_bytes(), message, group.place);
  group.forbidden = std::make_shared<device::ForbiddenRange>(static_cast<std::size_t>(group.full_bytes()),
                                                             "a view outlived its weights: " + message);
  group.real = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(group.full_bytes()),
      owned_pointer(group.forbidden->data(), group.forbidden, group.place), /*allocator=*/nullptr,
      /*resizable=*/false));
  for (const auto& parameter : group.parameters) {
    point_parameter(*parameter, group.real, group.layout->parameter_offset(parameter->index), group.dtype);
    parameter->guard_grad = make_guard_tensor(
        parameter->full, text("the gradient of ", parameter->name,
                              " lies in its shard: give the optimizer the "
                              "sharded model's shards() instead of parameters(), and use its zero_grad()"));
  }
  if (!whole) {
    group.detach();
    return;
  }
  group.weights = group.main;
  if (group.dtype != group.main_dtype) {
    group.weights = std::make_shared<device::Memory>(
        device.allocate(static_cast<std::size_t>(group.full_bytes()), "model weights", ledger));
    cast_elements(main_from(group, 0), group.layout->full_numel(),
                  {group.weights->data(), group.dtype, group.place});
  }
  group.attach(group.weights->data());
  group.real.unsafeGetStorageImpl()->set_data_ptr_noswap(
      owned_pointer(group.weights->data(), group.weights, group.place));
}

}  // namespace fsdpp::runtime
