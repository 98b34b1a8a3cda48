#include <algorithm>

#include "fsdpp/base/error.h"
#include "fsdpp/device/cuda_check.h"
#include "fsdpp/device/cuda_split.cuh"
#include "fsdpp/device/cuda_split.h"

namespace fsdpp::device {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // independent loads in flight

template <int V>
__device__ __forceinline__ void split(const float* weights, uint16_t* model, uint16_t* remainder,
                                      int64_t first, int64_t end) {
  float value[kUnroll][V];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + static_cast<int64_t>(u) * kThreads * V;
    if (i < end) load<V>(weights + i, value[u]);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + static_cast<int64_t>(u) * kThreads * V;
    if (i < end) store_split<V>(model + i, remainder + i, value[u]);
  }
}

template <int V>
__device__ __forceinline__ void join(const uint16_t* model, const uint16_t* remainder, float* weights,
                                     int64_t first, int64_t end) {
  float value[kUnroll][V];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + static_cast<int64_t>(u) * kThreads * V;
    if (i < end) load_split<V>(model + i, remainder + i, value[u]);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + static_cast<int64_t>(u) * kThreads * V;
    if (i < end) store<V>(weights + i, value[u]);
  }
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    split_kernel(const float* weights, uint16_t* model, uint16_t* remainder, int64_t count) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kUnroll * kThreads + threadIdx.x) * V;
  split<V>(weights, model, remainder, first, count / V * V);
  if (V > 1 && blockIdx.x == 0 && threadIdx.x < count % V)
    split<1>(weights, model, remainder, count / V * V + threadIdx.x, count / V * V + threadIdx.x + 1);
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    join_kernel(const uint16_t* model, const uint16_t* remainder, float* weights, int64_t count) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kUnroll * kThreads + threadIdx.x) * V;
  join<V>(model, remainder, weights, first, count / V * V);
  if (V > 1 && blockIdx.x == 0 && threadIdx.x < count % V)
    join<1>(model, remainder, weights, count / V * V + threadIdx.x, count / V * V + threadIdx.x + 1);
}

bool by_vectors(const void* weights, const void* model, const void* remainder) {
  return is_aligned(weights, 16) && is_aligned(model, 8) && is_aligned(remainder, 8);
}

unsigned blocks(int64_t count, int width) {
  const int64_t per_block = static_cast<int64_t>(kThreads) * kUnroll * width;
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

}  // namespace

void cuda_split(Stream stream, const float* weights, uint16_t* model, uint16_t* remainder, int64_t count) {
  require(count >= 0, "cuda_split: count = ", count, "; expected 0 or more");
  if (count == 0) return;
  if (by_vectors(weights, model, remainder)) {
    split_kernel<4><<<blocks(count, 4), kThreads, 0, stream>>>(weights, model, remainder, count);
  } else {
    split_kernel<1><<<blocks(count, 1), kThreads, 0, stream>>>(weights, model, remainder, count);
  }
  FSDPP_CUDA(cudaGetLastError());
}

void cuda_join(Stream stream, const uint16_t* model, const uint16_t* remainder, float* weights,
               int64_t count) {
  require(count >= 0, "cuda_join: count = ", count, "; expected 0 or more");
  if (count == 0) return;
  if (by_vectors(weights, model, remainder)) {
    join_kernel<4><<<blocks(count, 4), kThreads, 0, stream>>>(model, remainder, weights, count);
  } else {
    join_kernel<1><<<blocks(count, 1), kThreads, 0, stream>>>(model, remainder, weights, count);
  }
  FSDPP_CUDA(cudaGetLastError());
}

}  // namespace fsdpp::device
