#pragma once

#include <functional>
#include <memory>

#include "fsdpp/device/device.h"

namespace fsdpp::device {

/// GPUs that this process can use; 0 also where there is no driver.
[[nodiscard]] int cuda_devices() noexcept;

struct CudaOptions {
  /// Units of a pass that the host may be ahead of the compute lane before it waits.
  int units_ahead = 6;
  /// Memory whose life begins or ends is filled with NaN: what reads it too early or too late shows.
  bool poison = false;
  /// For tests: microseconds that the lane is held up by a kernel before this operation; null: never.
  std::function<int(const Operation&)> delay_us;
};

/// Makes GPU `index`, and on it a stream of high priority, current in this thread. Call it before the model
/// is built: then a GEMM's blocks go before those of a sum or a copy on another lane, which fill what GEMMs
/// leave idle. Throws UsageError when there is no GPU `index`.
void use_compute_stream(int index);

/// libtorch's allocator grows its segments page by page instead of reserving new ones beside those that do
/// not fit: what it reserves stays near what is in use. Call it before the first tensor on a GPU; does
/// nothing where the user has set PYTORCH_ALLOC_CONF.
void use_growing_memory();

/// Lanes of one GPU: `compute` is the stream that is current when this is called, the others are streams of
/// normal priority. All of the rank's threads (autograd's too) leave that stream current while they use the
/// model. Throws UsageError when there is no GPU `index`.
[[nodiscard]] std::unique_ptr<Device> make_cuda_device(int index, CudaOptions options = {});

}  // namespace fsdpp::device
