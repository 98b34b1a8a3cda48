#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "fsdpp/base/error.h"
#include "fsdpp/device/element.h"

// Loads and stores of V neighbouring elements by one instruction, as fp32 in registers (fp64 as itself). All
// of them say that the bytes are used once (evict first): these kernels stream through gigabytes, and what
// the GEMMs need should stay in the cache.
namespace fsdpp::device {

template <int kBytes>
struct WordOf;
template <>
struct WordOf<16> {
  using Type = uint4;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<4> {
  using Type = unsigned int;
};
template <>
struct WordOf<2> {
  using Type = unsigned short;
};
template <int kBytes>
using Word = typename WordOf<kBytes>::Type;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <int V, class T>
__device__ __forceinline__ void load(const T* source, T (&value)[V]) {
  using W = Word<V* static_cast<int>(sizeof(T))>;
  const W word = __ldcs(reinterpret_cast<const W*>(source));
  std::memcpy(&value, &word, sizeof(W));
}

template <int V, class T>
__device__ __forceinline__ void store(T* target, const T (&value)[V]) {
  using W = Word<V* static_cast<int>(sizeof(T))>;
  W word;
  std::memcpy(&word, &value, sizeof(W));
  __stcs(reinterpret_cast<W*>(target), word);
}

template <int V, class T>
__device__ __forceinline__ void load_floats(const T* source, float (&value)[V]) {
  T raw[V];
  load<V>(source, raw);
#pragma unroll
  for (int k = 0; k < V; ++k) value[k] = to_float(raw[k]);
}
template <int V>
__device__ __forceinline__ void load_floats(const double* source, double (&value)[V]) {
  load<V>(source, value);
}

// Rounds to nearest even. Pairs at a time: one instruction makes both halves of a register.
template <int V>
__device__ __forceinline__ void store_floats(__nv_bfloat16* target, const float (&value)[V]) {
  __nv_bfloat16 raw[V];
  if constexpr (V % 2 == 0) {
#pragma unroll
    for (int k = 0; k < V; k += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(value[k], value[k + 1]);
      raw[k] = pair.x;
      raw[k + 1] = pair.y;
    }
  } else {
    raw[0] = __float2bfloat16_rn(value[0]);
  }
  store<V>(target, raw);
}

template <int V>
__device__ __forceinline__ void store_floats(__half* target, const float (&value)[V]) {
  __half raw[V];
#pragma unroll
  for (int k = 0; k < V; ++k) raw[k] = __float2half_rn(value[k]);
  store<V>(target, raw);
}

template <int V>
__device__ __forceinline__ void store_floats(float* target, const float (&value)[V]) {
  store<V>(target, value);
}

/// Calls `function` with a null pointer to the type that stores `element`: all but fp64, which only sums
/// know.
template <class Function>
void with_element(Element element, Function function) {
  switch (element) {
    case Element::fp32:
      return function(static_cast<float*>(nullptr));
    case Element::bf16:
      return function(static_cast<__nv_bfloat16*>(nullptr));
    case Element::fp16:
      return function(static_cast<__half*>(nullptr));
    case Element::fp64:
      break;
  }
  throw UsageError("this kernel was given fp64; expected fp32, bf16 or fp16");
}

/// Whether `pointer` is a multiple of `bytes`.
__host__ __device__ inline bool is_aligned(const void* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

}  // namespace fsdpp::device
