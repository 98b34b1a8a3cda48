#include "fsdpp/comm/cuda_stream_wait.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>

#include "fsdpp/base/error.h"
#include "fsdpp/device/cuda_check.h"

namespace fsdpp::comm {
namespace {

using BatchMemOp = CUresult (*)(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);
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

BatchMemOp batch_mem_op() {
  static const auto function = driver_function<BatchMemOp>("cuStreamBatchMemOp");
  return function;
}

CUstreamBatchMemOpParams write_of(uint32_t* address, uint32_t value) {
  CUstreamBatchMemOpParams params = {};
  params.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  params.writeValue.address = reinterpret_cast<CUdeviceptr>(address);
  params.writeValue.value = value;
  return params;
}

CUstreamBatchMemOpParams wait_for(const uint32_t* address, uint32_t value) {
  CUstreamBatchMemOpParams params = {};
  params.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  params.waitValue.address = reinterpret_cast<CUdeviceptr>(address);
  params.waitValue.value = value;
  params.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  return params;
}

}  // namespace

bool can_stream_wait(int gpu) {
  const auto attribute = driver_function<GetAttribute>("cuDeviceGetAttribute");
  int can = 0;
  return attribute != nullptr && batch_mem_op() != nullptr &&
         attribute(&can, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, gpu) == CUDA_SUCCESS && can != 0;
}

void cuda_stream_wait(device::Stream stream, const uint32_t* address, uint32_t value, uint32_t* stands) {
  std::array operations = {write_of(stands, value), wait_for(address, value), write_of(stands, 0)};
  const CUresult status = batch_mem_op()(stream, operations.size(), operations.data(), 0);
  if (status != CUDA_SUCCESS)
    throw EnvironmentError(text("CUDA: cuStreamBatchMemOp failed with error ", static_cast<int>(status)));
}

}  // namespace fsdpp::comm
