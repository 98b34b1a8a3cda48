#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <string>

namespace fsdpp::runtime {

/// A storage of `bytes` whose every data access throws `message`. It has no way back to ordinary storage, so
/// a tensor is pointed at it and away from it again.
[[nodiscard]] c10::Storage make_guard_storage(int64_t bytes, std::string message, at::Device place);

/// The key of dense tensors at `place`.
[[nodiscard]] c10::DispatchKey dispatch_key(at::Device place);

/// A tensor with `like`'s sizes, dtype and place on a guard storage.
[[nodiscard]] at::Tensor make_guard_tensor(const at::Tensor& like, std::string message);

}  // namespace fsdpp::runtime
