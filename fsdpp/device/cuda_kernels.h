#pragma once

#include "fsdpp/device/kernels.h"

namespace fsdpp::device {

/// Kernels that launch on the stream that is current in the calling thread.
[[nodiscard]] const Kernels& cuda_kernels();

}  // namespace fsdpp::device
