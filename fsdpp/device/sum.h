#pragma once

#include <cstdint>
#include <span>

#include "fsdpp/device/element.h"

namespace fsdpp::device {

/// out[i] = (add_to_out ? out[i] : 0) + scale * (((s0[i] + s1[i]) + s2[i]) + ...) for 0 <= i < count, in fp32
/// with a rounding after each operation: the same sources in the same order give the same bits everywhere.
/// Without sources the sum is 0. When not adding, what `out` held is not read, and it may be one of the
/// sources that are stored like it; any other overlap is an error of the caller.
void sum_in_rank_order(float* out, std::span<const float* const> sources, int64_t count, float scale,
                       bool add_to_out);

/// The same of sources that are stored as `wire`. `out`, scale and all arithmetic are sum_element(wire).
void sum_in_rank_order(void* out, std::span<const void* const> sources, Element wire, int64_t count,
                       double scale, bool add_to_out);

}  // namespace fsdpp::device
