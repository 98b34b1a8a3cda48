#include "fsdpp/device/cuda_measure.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "fsdpp/device/cuda_check.h"

namespace fsdpp::device {

CudaStopwatch::CudaStopwatch() {
  FSDPP_CUDA(cudaEventCreate(&first_));
  FSDPP_CUDA(cudaEventCreate(&last_));
}

CudaStopwatch::~CudaStopwatch() {
  static_cast<void>(cudaEventDestroy(first_));
  static_cast<void>(cudaEventDestroy(last_));
}

void CudaStopwatch::start() {
  FSDPP_CUDA(cudaEventRecord(first_, c10::cuda::getCurrentCUDAStream().stream()));
}

void CudaStopwatch::stop() { FSDPP_CUDA(cudaEventRecord(last_, c10::cuda::getCurrentCUDAStream().stream())); }

double CudaStopwatch::milliseconds() const {
  float elapsed = 0;
  FSDPP_CUDA(cudaEventSynchronize(last_));
  FSDPP_CUDA(cudaEventElapsedTime(&elapsed, first_, last_));
  return elapsed;
}

CudaMemory cuda_memory() {
  std::size_t free = 0;
  std::size_t total = 0;
  FSDPP_CUDA(cudaMemGetInfo(&free, &total));
  CudaMemory memory{.taken = static_cast<int64_t>(total - free)};
  if (!c10::cuda::CUDACachingAllocator::get()->initialized()) return memory;  // no tensor yet
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(c10::cuda::current_device());
  return {memory.taken, stats.allocated_bytes[0].peak, stats.reserved_bytes[0].peak};
}

void cuda_reset_memory() {
  if (!c10::cuda::CUDACachingAllocator::get()->initialized()) return;  // no tensor yet
  c10::cuda::CUDACachingAllocator::emptyCache();
  c10::cuda::CUDACachingAllocator::resetPeakStats(c10::cuda::current_device());
}

void cuda_synchronize() { FSDPP_CUDA(cudaDeviceSynchronize()); }

}  // namespace fsdpp::device
