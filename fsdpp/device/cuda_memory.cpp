#include "fsdpp/device/cuda_memory.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"
#include "fsdpp/device/cuda_check.h"

namespace fsdpp::device {
namespace {

void free_device_memory(std::byte* data, std::size_t) noexcept {
  // Waits for whatever still runs. An error here would be one of an earlier operation, which is reported
  // there.
  static_cast<void>(cudaFree(data));
}

std::byte* allocate_on_device(std::size_t bytes, const std::string& purpose) {
  void* data = nullptr;
  if (cudaMalloc(&data, bytes) == cudaSuccess) return static_cast<std::byte*>(data);
  cudaGetLastError();
  c10::cuda::CUDACachingAllocator::emptyCache();  // libtorch may sit on what we need
  if (cudaMalloc(&data, bytes) == cudaSuccess) return static_cast<std::byte*>(data);
  cudaGetLastError();
  std::size_t free = 0;
  std::size_t total = 0;
  FSDPP_CUDA(cudaMemGetInfo(&free, &total));
  throw NoRoomError(text("no room for ", human_bytes(static_cast<int64_t>(bytes)), " of ", purpose,
                         " on the GPU: ", human_bytes(static_cast<int64_t>(free)), " of ",
                         human_bytes(static_cast<int64_t>(total)),
                         " are free; use more ranks, a smaller model or batch"));
}

void free_pinned_memory(std::byte* data, std::size_t) noexcept { static_cast<void>(cudaFreeHost(data)); }

std::byte* allocate_pinned(std::size_t bytes, const std::string& purpose) {
  void* data = nullptr;
  if (cudaHostAlloc(&data, bytes, cudaHostAllocDefault) == cudaSuccess) return static_cast<std::byte*>(data);
  cudaGetLastError();
  throw NoRoomError(text("no room for ", human_bytes(static_cast<int64_t>(bytes)), " of pinned memory for ",
                         purpose, "; raise the limit of locked memory, or use more ranks"));
}

}  // namespace

Memory take_cuda_memory(std::size_t bytes, std::string purpose, std::shared_ptr<Ledger> ledger) {
  std::byte* data = allocate_on_device(bytes, purpose);
  Memory memory(data, bytes, free_device_memory, std::move(purpose), std::move(ledger));
  const cudaStream_t stream = c10::cuda::getStreamFromPool().stream();
  FSDPP_CUDA(cudaMemsetAsync(data, 0, bytes, stream));
  FSDPP_CUDA(cudaStreamSynchronize(stream));
  return memory;
}

Memory take_pinned_memory(std::size_t bytes, std::string purpose, std::shared_ptr<Ledger> ledger) {
  std::byte* data = allocate_pinned(bytes, purpose);
  std::memset(data, 0, bytes);
  return {data, bytes, free_pinned_memory, std::move(purpose), std::move(ledger)};
}

}  // namespace fsdpp::device
