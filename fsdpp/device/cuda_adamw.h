#pragma once

#include <cstdint>

#include "fsdpp/device/cuda_stream.h"
#include "fsdpp/device/optimizer_kernels.h"

namespace fsdpp::device {

/// AdamW (Loshchilov and Hutter 2019) over all runs and the cast to the model's weights, one launch on
/// `stream`: the operations of ATen's fused CUDA kernel in its order, in fp32. Moves 30 bytes per weight with
/// bf16 model weights.
///
/// `runs`: `run_count` runs in device memory, as placed by place_tiles(), which returned `tiles`. `model`:
/// how the model's weights are stored. Full bandwidth where all pointers of a run have the same place within
/// 4 elements. Throws EnvironmentError if the launch fails.
void cuda_adamw(Stream stream, const AdamwRun* runs, int run_count, int64_t tiles, Element model,
                const AdamwStep& step);

/// Adds 1 to the device's counter: enqueued once per step, before that step's cuda_adamw() calls.
void cuda_advance_step(Stream stream, int64_t* step_counter);

}  // namespace fsdpp::device
