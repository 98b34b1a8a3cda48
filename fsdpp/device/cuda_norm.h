#pragma once

#include <cstdint>

#include "fsdpp/device/cuda_stream.h"
#include "fsdpp/device/optimizer_kernels.h"

namespace fsdpp::device {

/// This rank's part of a norm: *part = the sum of |x|^norm_type over all runs, or for infinity the largest
/// |x|; NaN wins over everything. In fp64, in an order that depends on the counts and on where within 16
/// bytes the runs begin alone: the same bits every time and on every GPU.
///
/// Two launches on `stream`. `runs`: `run_count` runs in device memory, as placed by place_tiles(), which
/// returned `tiles`; no runs give 0. `workspace` and `part` are device memory; two calls that may run at once
/// need two workspaces. Throws UsageError for a norm_type that is not above 0, EnvironmentError if a launch
/// fails.
void cuda_norm_part(Stream stream, const NormRun* runs, int run_count, int64_t tiles, double norm_type,
                    double* workspace, double* part);

/// From the parts of all ranks, added in rank order: *norm, and *factor = min(1, max_norm / (*norm + 1e-6)),
/// NaN if the norm is. What clip_grad_norm() does, without the host. `parts`: `ranks` doubles of device
/// memory. Throws UsageError for ranks < 1, max_norm < 0 or a norm_type that is not above 0; EnvironmentError
/// if the launch fails.
void cuda_clip_factor(Stream stream, const double* parts, int ranks, double norm_type, double max_norm,
                      double* norm, float* factor);

}  // namespace fsdpp::device
