#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "fsdpp/device/device.h"

// Differentiable operations whose numbers are computed on the compute lane of `device`, in fp32.
namespace fsdpp::test {

/// Rows `indices` [...] of weight [rows, dim]: [..., dim].
[[nodiscard]] at::Tensor deferred_embedding(device::Device& device, const at::Tensor& weight,
                                            const at::Tensor& indices);
/// input [..., in] times weight [out, in] transposed, plus bias [out] when defined.
[[nodiscard]] at::Tensor deferred_linear(device::Device& device, const at::Tensor& input,
                                         const at::Tensor& weight, const at::Tensor& bias = {});
/// As bounded() of integer_model.h.
[[nodiscard]] at::Tensor deferred_bounded(device::Device& device, const at::Tensor& x);
/// x twice: autograd would add the gradients of two uses of one tensor by itself.
[[nodiscard]] std::pair<at::Tensor, at::Tensor> deferred_fork(device::Device& device, const at::Tensor& x);
/// a + b.
[[nodiscard]] at::Tensor deferred_sum(device::Device& device, const at::Tensor& a, const at::Tensor& b);
/// sum(x * coefficients), a scalar.
[[nodiscard]] at::Tensor deferred_dot(device::Device& device, const at::Tensor& x,
                                      const at::Tensor& coefficients);

/// A number for the bits of all weights that deferred_linear() has read on `device`'s compute lane since the
/// last call, in their order. (Activations are rounded: what a stale weight changes need not show in them.)
/// The lane must have come to its end.
[[nodiscard]] uint64_t take_weights_read(const device::Device& device);

/// `count` floats as an access names them.
[[nodiscard]] inline ByteRange floats(const float* begin, int64_t count) {
  return {begin, static_cast<std::size_t>(count) * sizeof(float)};
}

}  // namespace fsdpp::test
