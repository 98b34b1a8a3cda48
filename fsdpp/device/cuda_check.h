#pragma once

#include <cuda_runtime_api.h>

#include "fsdpp/base/error.h"

namespace fsdpp::device {

/// Throws EnvironmentError with CUDA's own words unless `status` is cudaSuccess. The runtime's last error is
/// cleared, so that it is not reported a second time by whoever asks next.
inline void cuda_check(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw EnvironmentError(text("CUDA: ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ") from ",
                              call, " at ", file, ":", line));
}

/// Multiprocessors of the current device.
inline int multiprocessors() {
  int device = 0;
  int count = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice", __FILE__, __LINE__);
  cuda_check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute",
             __FILE__, __LINE__);
  return count;
}

}  // namespace fsdpp::device

/// Throws EnvironmentError unless the CUDA runtime call succeeds. After a launch:
/// FSDPP_CUDA(cudaGetLastError()).
#define FSDPP_CUDA(call) ::fsdpp::device::cuda_check((call), #call, __FILE__, __LINE__)
