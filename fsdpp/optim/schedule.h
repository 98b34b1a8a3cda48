#pragma once

#include <cstdint>

namespace fsdpp::optim {

/// Learning rate at `step` (from 0) of `total`: rises linearly over `warmup` steps to `peak`, then falls
/// along half a cosine to `min_ratio * peak` at the last step (Loshchilov and Hutter 2017), and stays there.
/// Throws UsageError, naming the value, for a negative step, warmup or peak, warmup above total, or a
/// min_ratio outside [0, 1].
[[nodiscard]] double warmup_cosine(int64_t step, int64_t warmup, int64_t total, double peak,
                                   double min_ratio);

}  // namespace fsdpp::optim
