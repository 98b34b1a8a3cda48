#pragma once

#include <cstddef>
#include <cstdint>

#include "fsdpp/device/cuda_stream.h"

namespace fsdpp::device {

/// For tests that delay operations: later work of the stream waits for `microseconds`, or until the word at
/// `stop` (mapped host memory, or null) is not zero, whichever is first. Occupies one thread. Throws
/// EnvironmentError if the launch fails.
void cuda_spin(Stream stream, int64_t microseconds, const uint32_t* stop = nullptr);

/// Fills `bytes` of device memory with 0xFF, a NaN in every floating-point type: what is read after its
/// release shows.
void cuda_poison(Stream stream, void* memory, std::size_t bytes);

/// Loads the spin kernel now: see load_signal_kernels().
void load_spin_kernel();

}  // namespace fsdpp::device
