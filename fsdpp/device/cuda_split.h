#pragma once

#include <cstdint>

#include "fsdpp/device/cuda_stream.h"
#include "fsdpp/device/split_weight.h"

namespace fsdpp::device {

/// Splits `count` fp32 weights into bf16 and remainder (see SplitWeight), or joins them: enqueued on
/// `stream`. Device memory, aligned to its elements; at full bandwidth where `weights` lies at a multiple of
/// 16 bytes and the halves at multiples of 8. No two of the three may overlap. Throws UsageError for count <
/// 0, EnvironmentError if the launch fails.
void cuda_split(Stream stream, const float* weights, uint16_t* model, uint16_t* remainder, int64_t count);
void cuda_join(Stream stream, const uint16_t* model, const uint16_t* remainder, float* weights,
               int64_t count);

}  // namespace fsdpp::device
