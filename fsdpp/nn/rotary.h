#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdpp::nn {

/// Rotary angles of positions 0 .. length-1 as {cos, sin}, each [length, head_size] with the two halves equal
/// (Su et al. 2021, in the "rotate half" layout of the Llama models).
struct Rotary {
  at::Tensor cos, sin;
};
[[nodiscard]] Rotary rotary(int64_t length, int64_t head_size, double theta, at::TensorOptions options);

/// x [..., length, head_size] with the halves (a, b) of each head turned to (a cos - b sin, b cos + a sin),
/// in x's dtype and memory order. Three kernels, and three in backward; differentiable any number of times.
[[nodiscard]] at::Tensor rotate(const at::Tensor& x, const Rotary& rotary);

}  // namespace fsdpp::nn
