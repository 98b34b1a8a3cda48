#include "fsdpp/runtime/guard.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <utility>

namespace fsdpp::runtime {

c10::Storage make_guard_storage(int64_t bytes, std::string message) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                             static_cast<size_t>(bytes),
                                                             c10::DataPtr(nullptr, c10::DeviceType::CPU),
                                                             /*allocator=*/nullptr, /*resizable=*/false));
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
  return storage;
}

at::Tensor make_guard_tensor(const at::Tensor& like, std::string message) {
  const auto bytes = static_cast<int64_t>(like.numel() * static_cast<int64_t>(like.element_size()));
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(make_guard_storage(bytes, std::move(message)),
                                               c10::DispatchKeySet(c10::DispatchKey::CPU), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(like.sizes());
  return tensor;
}

}  // namespace fsdpp::runtime
