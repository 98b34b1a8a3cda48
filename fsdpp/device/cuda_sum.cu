#include <algorithm>

#include "fsdpp/base/error.h"
#include "fsdpp/device/cuda_check.h"
#include "fsdpp/device/cuda_element.cuh"
#include "fsdpp/device/cuda_sum.h"

namespace fsdpp::device {
namespace {

constexpr int kThreads = 256;

struct Sources {
  const void* pointers[kMaxSumSources];
  int count;
};

// Which elements go by vectors: [head, head + vectors * V). The few before and behind go one by one.
struct Cut {
  int64_t head;
  int64_t vectors;
  int64_t count;
};

template <bool kAdd>
__device__ __forceinline__ float finish(float sum, float scale, float before) {
  const float scaled = __fmul_rn(scale, sum);
  return kAdd ? __fadd_rn(before, scaled) : scaled;
}

template <class T, bool kAdd>
__device__ void sum_one(float* out, const Sources& sources, int64_t i, float scale) {
  float sum = device::to_float(static_cast<const T*>(sources.pointers[0])[i]);
  for (int s = 1; s < sources.count; ++s)
    sum = __fadd_rn(sum, device::to_float(static_cast<const T*>(sources.pointers[s])[i]));
  out[i] = finish<kAdd>(sum, scale, kAdd ? out[i] : 0.0F);
}

// The vectors of up to `kGroup` sources are loaded before the first of them is added.
template <class T, int V, int kUnroll, int kGroup>
__device__ __forceinline__ void add_group(float (&sum)[kUnroll][V], const Sources& sources, int first_source,
                                          int64_t first, int64_t end, bool set) {
  float value[kGroup][kUnroll][V];
#pragma unroll
  for (int s = 0; s < kGroup; ++s) {
    const T* const source = static_cast<const T*>(sources.pointers[first_source + s]);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + static_cast<int64_t>(u) * kThreads * V;
      if (i < end) device::load_floats<V>(source + i, value[s][u]);
    }
  }
#pragma unroll
  for (int s = 0; s < kGroup; ++s) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        sum[u][k] = set && s == 0 ? value[s][u][k] : __fadd_rn(sum[u][k], value[s][u][k]);
      }
    }
  }
}

// kSources: the number of sources where it is 1 to 4, else 0: any number of them, in groups of four.
template <class T, int V, int kSources, bool kAdd>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(float* out, const __grid_constant__ Sources sources, const Cut cut, const float scale) {
  constexpr int kUnroll = kSources == 1 || kSources == 2 ? 4 : 2;
  const int64_t end = cut.head + cut.vectors * V;
  const int64_t first = cut.head + (static_cast<int64_t>(blockIdx.x) * kUnroll * kThreads + threadIdx.x) * V;
  float before[kUnroll][V];
  float sum[kUnroll][V];
  if constexpr (kAdd) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + static_cast<int64_t>(u) * kThreads * V;
      if (i < end) device::load_floats<V>(out + i, before[u]);
    }
  }
  if constexpr (kSources > 0) {
    add_group<T, V, kUnroll, kSources>(sum, sources, 0, first, end, true);
  } else {
    add_group<T, V, kUnroll, 1>(sum, sources, 0, first, end, true);
    int s = 1;
    for (; s + 4 <= sources.count; s += 4) add_group<T, V, kUnroll, 4>(sum, sources, s, first, end, false);
    for (; s < sources.count; ++s) add_group<T, V, kUnroll, 1>(sum, sources, s, first, end, false);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + static_cast<int64_t>(u) * kThreads * V;
    float result[V];
#pragma unroll
    for (int k = 0; k < V; ++k) result[k] = finish<kAdd>(sum[u][k], scale, kAdd ? before[u][k] : 0.0F);
    if (i < end) device::store<V>(out + i, result);
  }
  if (V > 1 && blockIdx.x == 0) {
    const int64_t rest = cut.count - cut.vectors * V;
    if (threadIdx.x < rest) {
      sum_one<T, kAdd>(out, sources, threadIdx.x < cut.head ? threadIdx.x : threadIdx.x + cut.vectors * V,
                       scale);
    }
  }
}

template <class T, int V, int kSources>
void launch(Stream stream, float* out, const Sources& sources, const Cut& cut, float scale, bool add) {
  constexpr int64_t kPerBlock = static_cast<int64_t>(kThreads) * (kSources == 1 || kSources == 2 ? 4 : 2);
  const auto blocks = static_cast<unsigned>(std::max<int64_t>(1, (cut.vectors + kPerBlock - 1) / kPerBlock));
  const auto kernel = add ? sum_kernel<T, V, kSources, true> : sum_kernel<T, V, kSources, false>;
  kernel<<<blocks, kThreads, 0, stream>>>(out, sources, cut, scale);
  FSDPP_CUDA(cudaGetLastError());
}

template <class T>
void sum(Stream stream, float* out, const Sources& sources, int64_t count, float scale, bool add) {
  constexpr int V = 4;
  const auto within = static_cast<int64_t>(reinterpret_cast<std::uintptr_t>(out) % 16 / sizeof(float));
  const int64_t head = std::min((V - within) % V, count);
  bool vectors = count - head >= V;
  for (int s = 0; s < sources.count; ++s)
    vectors = vectors && device::is_aligned(static_cast<const T*>(sources.pointers[s]) + head, V * sizeof(T));
  if (!vectors) return launch<T, 1, 0>(stream, out, sources, {0, count, count}, scale, add);
  const Cut cut = {head, (count - head) / V, count};
  switch (sources.count) {
    case 1:
      return launch<T, V, 1>(stream, out, sources, cut, scale, add);
    case 2:
      return launch<T, V, 2>(stream, out, sources, cut, scale, add);
    case 3:
      return launch<T, V, 3>(stream, out, sources, cut, scale, add);
    case 4:
      return launch<T, V, 4>(stream, out, sources, cut, scale, add);
    default:
      return launch<T, V, 0>(stream, out, sources, cut, scale, add);
  }
}

}  // namespace

void cuda_sum_in_rank_order(Stream stream, float* out, std::span<const void* const> sources, Element wire,
                            int64_t count, float scale, bool add_to_out) {
  require(sources.size() <= kMaxSumSources, "cuda_sum_in_rank_order: ", sources.size(),
          " sources; expected at most ", kMaxSumSources);
  require(count >= 0, "cuda_sum_in_rank_order: count = ", count, "; expected 0 or more");
  require(wire != Element::fp16, "cuda_sum_in_rank_order: the wire is fp16; expected fp32 or bf16");
  if (count == 0) return;
  if (sources.empty()) {
    if (!add_to_out)
      FSDPP_CUDA(cudaMemsetAsync(out, 0, static_cast<std::size_t>(count) * sizeof(float), stream));
    return;
  }
  Sources table{};
  table.count = static_cast<int>(sources.size());
  std::copy(sources.begin(), sources.end(), table.pointers);
  if (wire == Element::fp32) {
    sum<float>(stream, out, table, count, scale, add_to_out);
  } else {
    sum<__nv_bfloat16>(stream, out, table, count, scale, add_to_out);
  }
}

}  // namespace fsdpp::device
