#include "fsdpp/runtime/guard.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <utility>

namespace fsdpp::runtime {

c10::Storage make_guard_storage(int64_t bytes, std::string message, at::Device place) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(bytes), c10::DataPtr(nullptr, place),
      /*allocator=*/nullptr, /*resizable=*/false));
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
  return storage;
}

c10::DispatchKey dispatch_key(at::Device place) {
  return place.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
}

at::Tensor make_guard_tensor(const at::Tensor& like, std::string message) {
  const auto bytes = static_cast<int64_t>(like.numel() * static_cast<int64_t>(like.element_size()));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      make_guard_storage(bytes, std::move(message), like.device()),
      c10::DispatchKeySet(dispatch_key(like.device())), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(like.sizes());
  return tensor;
}

}  // namespace fsdpp::runtime
