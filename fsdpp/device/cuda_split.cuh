#pragma once

#include "fsdpp/device/cuda_element.cuh"
#include "fsdpp/device/split_weight.h"

namespace fsdpp::device {

template <int V>
__device__ __forceinline__ void load_split(const uint16_t* model, const uint16_t* remainder,
                                           float (&weight)[V]) {
  uint16_t upper[V];
  uint16_t lower[V];
  load<V>(model, upper);
  load<V>(remainder, lower);
#pragma unroll
  for (int k = 0; k < V; ++k) weight[k] = __uint_as_float(join_bits({upper[k], lower[k]}));
}

template <int V>
__device__ __forceinline__ void store_split(uint16_t* model, uint16_t* remainder, const float (&weight)[V]) {
  uint16_t upper[V];
  uint16_t lower[V];
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const SplitWeight split = split_bits(__float_as_uint(weight[k]));
    upper[k] = split.model;
    lower[k] = split.remainder;
  }
  store<V>(model, upper);
  store<V>(remainder, lower);
}

}  // namespace fsdpp::device
