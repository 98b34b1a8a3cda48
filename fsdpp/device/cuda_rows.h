#pragma once

#include <cstdint>

#include "fsdpp/device/cuda_stream.h"
#include "fsdpp/device/rows.h"

namespace fsdpp::device {

/// gather_rows() on the GPU, enqueued on `stream`: `ids` are `count` ids in device memory, the shards device
/// or peer memory. Accesses are of 16 bytes where a row's bytes, a shard's bytes and all pointers are
/// multiples of 16, else of the largest power of two that divides them. An id outside [0, rows) stops the
/// kernel (the device is lost). Throws EnvironmentError if the launch fails.
void cuda_gather_rows(Stream stream, void* out, const int64_t* ids, int64_t count, const RowTable& table);

/// add_rows() on the GPU, enqueued on `stream`: ids, their order and `out` in device memory, gradients in
/// device or peer memory. Same bits as on the host (a NaN's own bits are left open), no atomics. Full speed
/// where dim, out.begin and out.count are multiples of 4 and the pointers of 16 bytes; for ids that occur
/// often also dim of 8.
///
/// Two launches: one for all rows, and one for those that occur often, where many blocks share the row's
/// elements. Throws EnvironmentError if a launch fails.
void cuda_add_rows(Stream stream, const RowSums& out, const SortedIds& ids, const RowGradients& gradients,
                   float scale, bool add_to_out);

}  // namespace fsdpp::device
