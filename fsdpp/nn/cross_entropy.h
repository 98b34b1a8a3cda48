#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdpp::nn {

/// Targets that count nothing, as in libtorch.
constexpr int64_t kIgnoredTarget = -100;

/// Scores that are worked on at a time: 128 MiB of fp32.
constexpr int64_t kScoresAtATime = int64_t{1} << 25;

/// Mean over tokens of -log softmax(scores)[target], in fp32: what at::cross_entropy_loss gives for the
/// scores in fp32. Tokens are worked on in pieces, and their softmax again in the backward: of scores and
/// their gradient, often the largest tensors of a step, no copy in fp32 is ever whole (the idea is that of
/// Cut Your Losses, Wijmans et al. 2024, and of Liger Kernel; the operations are ATen's). scores [tokens,
/// classes], of a floating dtype; targets [tokens], int64, each a class or kIgnoredTarget. Returns a scalar
/// in fp32; its gradient has the dtype of scores, and no gradient of its own: asked for one, it throws
/// UsageError. So does a call whose shapes do not fit.
[[nodiscard]] at::Tensor cross_entropy(const at::Tensor& scores, const at::Tensor& targets,
                                       int64_t at_a_time = kScoresAtATime);

}  // namespace fsdpp::nn
