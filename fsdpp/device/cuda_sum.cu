#include <algorithm>
#include <type_traits>

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

// As what elements stored as T are added.
template <class T>
using SumOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
__device__ __forceinline__ SumOf<T> widen(T value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else {
    return device::to_float(value);
  }
}
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double times(double a, double b) { return __dmul_rn(a, b); }

template <bool kAdd, class S>
__device__ __forceinline__ S finish(S sum, S scale, S before) {
  const S scaled = times(scale, sum);
  return kAdd ? plus(before, scaled) : scaled;
}

template <class T, bool kAdd>
__device__ void sum_one(SumOf<T>* out, const Sources& sources, int64_t i, SumOf<T> scale) {
  SumOf<T> sum = widen(static_cast<const T*>(sources.pointers[0])[i]);
  for (int s = 1; s < sources.count; ++s)
    sum = plus(sum, widen(static_cast<const T*>(sources.pointers[s])[i]));
  out[i] = finish<kAdd>(sum, scale, kAdd ? out[i] : SumOf<T>{0});
}

// The vectors of up to `kGroup` sources are loaded before the first of them is added.
template <class T, int V, int kUnroll, int kGroup>
__device__ __forceinline__ void add_group(SumOf<T> (&sum)[kUnroll][V], const Sources& sources,
                                          int first_source, int64_t first, int64_t end, bool set) {
  SumOf<T> value[kGroup][kUnroll][V];
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
        sum[u][k] = set && s == 0 ? value[s][u][k] : plus(sum[u][k], value[s][u][k]);
      }
    }
  }
}

// kSources: the number of sources where it is 1 to 4, else 0: any number of them, in groups of four.
template <class T, int V, int kSources, bool kAdd>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(SumOf<T>* out, const __grid_constant__ Sources sources, const Cut cut, const SumOf<T> scale) {
  constexpr int kUnroll = kSources == 1 || kSources == 2 ? 4 : 2;
  const int64_t end = cut.head + cut.vectors * V;
  const int64_t first = cut.head + (static_cast<int64_t>(blockIdx.x) * kUnroll * kThreads + threadIdx.x) * V;
  SumOf<T> before[kUnroll][V];
  SumOf<T> sum[kUnroll][V];
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
    SumOf<T> result[V];
#pragma unroll
    for (int k = 0; k < V; ++k) result[k] = finish<kAdd>(sum[u][k], scale, kAdd ? before[u][k] : SumOf<T>{0});
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
void launch(Stream stream, SumOf<T>* out, const Sources& sources, const Cut& cut, SumOf<T> scale, bool add) {
  constexpr int64_t kPerBlock = static_cast<int64_t>(kThreads) * (kSources == 1 || kSources == 2 ? 4 : 2);
  const auto blocks = static_cast<unsigned>(std::max<int64_t>(1, (cut.vectors + kPerBlock - 1) / kPerBlock));
  const auto kernel = add ? sum_kernel<T, V, kSources, true> : sum_kernel<T, V, kSources, false>;
  kernel<<<blocks, kThreads, 0, stream>>>(out, sources, cut, scale);
  FSDPP_CUDA(cudaGetLastError());
}

template <class T>
void sum(Stream stream, void* to, const Sources& sources, int64_t count, double scale_as_given, bool add) {
  constexpr int V = 16 / sizeof(SumOf<T>);
  auto* const out = static_cast<SumOf<T>*>(to);
  const auto scale = static_cast<SumOf<T>>(scale_as_given);
  const auto within = static_cast<int64_t>(reinterpret_cast<std::uintptr_t>(out) % 16 / sizeof(SumOf<T>));
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

void cuda_sum_in_rank_order(Stream stream, void* out, std::span<const void* const> sources, Element wire,
                            int64_t count, double scale, bool add_to_out) {
  require(sources.size() <= kMaxSumSources, "cuda_sum_in_rank_order: ", sources.size(),
          " sources; expected at most ", kMaxSumSources);
  require(count >= 0, "cuda_sum_in_rank_order: count = ", count, "; expected 0 or more");
  if (count == 0) return;
  if (sources.empty()) {
    const std::size_t bytes = static_cast<std::size_t>(count) * element_size(sum_element(wire));
    if (!add_to_out) FSDPP_CUDA(cudaMemsetAsync(out, 0, bytes, stream));
    return;
  }
  Sources table{};
  table.count = static_cast<int>(sources.size());
  std::copy(sources.begin(), sources.end(), table.pointers);
  if (wire == Element::fp64) return sum<double>(stream, out, table, count, scale, add_to_out);
  with_element(wire, [&]<class T>(T*) { sum<T>(stream, out, table, count, scale, add_to_out); });
}

}  // namespace fsdpp::device
