#include "fsdpp/device/cuda_check.h"
#include "fsdpp/device/cuda_delay.h"

namespace fsdpp::device {
namespace {

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

__global__ void spin_kernel(uint64_t duration, const volatile uint32_t* stop) {
  const uint64_t begin = nanoseconds();
  while (nanoseconds() - begin < duration) {
    if (stop != nullptr && *stop != 0) break;
    __nanosleep(200);
  }
}

}  // namespace

void cuda_spin(Stream stream, int64_t microseconds, const uint32_t* stop) {
  if (microseconds <= 0) return;
  spin_kernel<<<1, 1, 0, stream>>>(static_cast<uint64_t>(microseconds) * 1000, stop);
  FSDPP_CUDA(cudaGetLastError());
}

void cuda_poison(Stream stream, void* memory, std::size_t bytes) {
  if (bytes > 0) FSDPP_CUDA(cudaMemsetAsync(memory, 0xFF, bytes, stream));
}

void load_spin_kernel() {
  cudaFuncAttributes attributes{};
  FSDPP_CUDA(cudaFuncGetAttributes(&attributes, spin_kernel));
}

}  // namespace fsdpp::device
