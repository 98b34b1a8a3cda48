#pragma once

#include <cstdint>

#include "fsdpp/device/cuda_stream.h"

namespace fsdpp::comm {

/// Later work of `stream` runs once the counter at `address` (this GPU's memory) has reached `value`, by
/// their difference as a signed number. Meanwhile `stands` (pinned host memory) shows `value`, which is not
/// 0; before and after, 0. The stream's own hardware waits: no kernel spins, so no multiprocessor is taken
/// from others (a GEMM that wants a whole multiprocessor cannot share it with a spinning warp). Throws
/// EnvironmentError when the driver refuses.
void cuda_stream_wait(device::Stream stream, const uint32_t* address, uint32_t value, uint32_t* stands);

/// False where the device or driver cannot do so: then a kernel has to spin.
[[nodiscard]] bool can_stream_wait(int gpu);

}  // namespace fsdpp::comm
