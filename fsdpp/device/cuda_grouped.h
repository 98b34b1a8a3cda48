#pragma once

#include <cstdint>
#include <span>

#include "fsdpp/device/cuda_stream.h"
#include "fsdpp/device/grouped.h"

namespace fsdpp::device {

/// The weight gradients of a grouped linear layer, a product for each of the groups of rows; g counts from
/// product.first:
///
///     out[g] = scale * left[rows of g]^T @ right[rows of g]                    if add[g] is 0
///     out[g] = kept * out[g] + scale * left[rows of g]^T @ right[rows of g]    else
///
/// out[g]: [m, n] fp32, row-major and contiguous, device memory; read only where add[g] is not 0. A group
/// without rows gives zeros, or kept * out[g]. Rows of other groups never count, NaN or not.
///
/// Enqueued on `stream`; `offsets` is read by the kernels alone, so the host waits for nothing, allocates
/// nothing on the device, and the call can be captured into a CUDA graph (which keeps the pointers of `out`
/// and the flags of `add`). Products of bf16 and fp16 are exact; sums are in fp32, in an order fixed by the
/// shapes and the offsets: the same bits every time. Hopper's tensor cores take the shapes that
/// cuda_grouped_sm90.h names and round sums in their own way; a plain kernel, some 30 times slower, does all
/// the rest with a rounding after each fused multiply-add.
///
/// The matrices and the outputs are aligned to their elements and do not overlap. Throws UsageError for sizes
/// that differ or are out of range; EnvironmentError if a launch fails.
void cuda_grouped_products(Stream stream, const GroupedProduct& product, std::span<float* const> out,
                           std::span<const uint8_t> add);

}  // namespace fsdpp::device
