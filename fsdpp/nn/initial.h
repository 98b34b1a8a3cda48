#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace fsdpp::nn {

/// A weight's first values: [sizes] of `dtype`, normal with `deviation` around 0, where `generator` draws
/// (the CPU or a GPU).
[[nodiscard]] at::Tensor normal(at::IntArrayRef sizes, double deviation, at::Generator& generator,
                                at::ScalarType dtype = at::kFloat);

}  // namespace fsdpp::nn
