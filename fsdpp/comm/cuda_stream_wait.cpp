#include "fsdpp/comm/cuda_stream_wait.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "fsdpp/base/error.h"
#include "fsdpp/device/cuda_check.h"

namespace fsdpp::comm {
namespace {

using WaitValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
using GetAttribute = CUresult (*)(int*, CUdevice_attribute, CUdevice);

// libcuda.so is the driver's: it is not linked, so that programs start where there is none.
template <class Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr unsigned int kVersion = 12000;
  if (cudaGetDriverEntryPointByVersion(name, &function, kVersion, cudaEnableDefault, &found) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function) : nullptr;
}

WaitValue wait_value() {
  static const auto function = driver_function<WaitValue>("cuStreamWaitValue32");
  return function;
}

}  // namespace

bool can_stream_wait(int gpu) {
  const auto attribute = driver_function<GetAttribute>("cuDeviceGetAttribute");
  int can = 0;
  return attribute != nullptr && wait_value() != nullptr &&
         attribute(&can, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, gpu) == CUDA_SUCCESS && can != 0;
}

void cuda_stream_wait(device::Stream stream, const uint32_t* address, uint32_t value) {
  const CUresult status =
      wait_value()(stream, reinterpret_cast<CUdeviceptr>(address), value, CU_STREAM_WAIT_VALUE_GEQ);
  if (status != CUDA_SUCCESS)
    throw EnvironmentError(text("CUDA: cuStreamWaitValue32 failed with error ", static_cast<int>(status)));
}

}  // namespace fsdpp::comm
