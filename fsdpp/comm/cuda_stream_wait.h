#pragma once

#include <cstdint>

#include "fsdpp/device/cuda_stream.h"

namespace fsdpp::comm {

/// Host memory in which a stream shows where it stands: the number of the wait that it last began, and of the
/// one that it last ended.
struct WaitMarks {
  uint32_t* begun;
  uint32_t* ended;
};

/// Later work of `stream` runs once the counter at `address` (this GPU's memory) has reached `value`, by
/// their difference as a signed number; `number` goes to `marks` before and after. The stream's own hardware
/// waits: no kernel spins, so no multiprocessor is taken from others (a GEMM that wants a whole
/// multiprocessor cannot share it with a spinning warp). Throws EnvironmentError when the driver refuses.
void cuda_stream_wait(device::Stream stream, const uint32_t* address, uint32_t value, const WaitMarks& marks,
                      uint32_t number);

/// False where the device or driver cannot do so: then a kernel has to spin.
[[nodiscard]] bool can_stream_wait(int gpu);

}  // namespace fsdpp::comm
