#pragma once

#include <cstdint>
#include <span>

#include "fsdpp/device/cuda_stream.h"
#include "fsdpp/device/element.h"

namespace fsdpp::device {

/// Most sources of one sum.
inline constexpr int kMaxSumSources = 16;

/// out[i] = scale * (((s0[i] + s1[i]) + s2[i]) + ...), added to out[i] if `add_to_out`, for 0 <= i < count:
/// enqueued on `stream`. `out`, `scale` and all arithmetic are sum_element(wire), with a rounding after each
/// operation: the bits of device::sum_in_rank_order on the host (which bits a NaN has is left open). Without
/// sources the sum is 0.
///
/// `wire`: how the sources are stored. All pointers are device or peer memory, aligned to their element;
/// where all have the same place within 16 bytes the kernel runs at the bandwidth of its bytes. When not
/// adding, `out` is not read and may be one of the sources that are stored like it; any other overlap is an
/// error of the caller. Throws UsageError for more than kMaxSumSources sources or count < 0; EnvironmentError
/// if the launch fails.
void cuda_sum_in_rank_order(Stream stream, void* out, std::span<const void* const> sources, Element wire,
                            int64_t count, double scale, bool add_to_out);

}  // namespace fsdpp::device
