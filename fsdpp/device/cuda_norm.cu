#include <cmath>

#include "fsdpp/base/error.h"
#include "fsdpp/device/cuda_check.h"
#include "fsdpp/device/cuda_element.cuh"
#include "fsdpp/device/cuda_norm.h"
#include "fsdpp/device/cuda_runs.cuh"

namespace fsdpp::device {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// The number is part of the result's bits, so it is the same on every GPU: an H100's or H200's 132
// multiprocessors times the 4 blocks that fit on each.
constexpr int kBlocks = kNormWorkspace;
constexpr int kUnroll = 4;  // vectors in flight; a tile is one round of them
static_assert(kTile == kThreads * kUnroll * 4);

enum class Kind { squares, absolutes, powers, largest };

template <Kind kKind>
__device__ __forceinline__ double term(float x, double norm_type) {
  const double value = x;
  if constexpr (kKind == Kind::squares) return value * value;
  if constexpr (kKind == Kind::powers) return pow(fabs(value), norm_type);
  return fabs(value);
}

template <Kind kKind>
__device__ __forceinline__ double join(double a, double b) {
  if constexpr (kKind == Kind::largest)
    return isnan(b) || b > a ? b : a;  // a NaN in `a` stays: b > NaN is false
  return a + b;
}

// The block's total in thread 0, always by the same tree.
template <Kind kKind>
__device__ double block_total(double value) {
  __shared__ double of_warp[kWarps];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = join<kKind>(value, __shfl_down_sync(0xffffffffU, value, distance));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) value = join<kKind>(value, of_warp[w]);
  }
  return value;
}

template <Kind kKind>
__device__ double tile_total(const NormRun& run, int64_t begin, int64_t end, double total, double norm_type) {
  const int head = to_aligned(run.data);
  const int64_t first = begin + head < end ? begin + head : end;
  const int64_t last = first + (end - first) / 4 * 4;
  float value[kUnroll][4] = {};
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + (u * kThreads + static_cast<int>(threadIdx.x)) * 4;
    if (i < last) load<4>(run.data + i, value[u]);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int k = 0; k < 4; ++k) total = join<kKind>(total, term<kKind>(value[u][k], norm_type));
  }
  const auto before = static_cast<int>(first - begin);
  if (threadIdx.x < before + static_cast<int>(end - last)) {
    const int64_t i = threadIdx.x < before ? begin + threadIdx.x : last + threadIdx.x - before;
    total = join<kKind>(total, term<kKind>(run.data[i], norm_type));
  }
  return total;
}

template <Kind kKind>
__global__ void __launch_bounds__(kThreads, 4)
    part_kernel(const RunTable<NormRun> table, const double norm_type, double* workspace) {
  double total = 0;
  const auto tile = [&](const NormRun& run, int64_t begin, int64_t end) {
    total = tile_total<kKind>(run, begin, end, total, norm_type);
  };
  for_each_tile(table, [](const NormRun&) {}, tile);
  total = block_total<kKind>(total);
  if (threadIdx.x == 0) workspace[blockIdx.x] = total;
}

template <Kind kKind>
__global__ void __launch_bounds__(kThreads) total_kernel(const double* workspace, double* part) {
  double total = 0;
  for (int b = static_cast<int>(threadIdx.x); b < kBlocks; b += kThreads)
    total = join<kKind>(total, workspace[b]);
  total = block_total<kKind>(total);
  if (threadIdx.x == 0) *part = total;
}

template <Kind kKind>
void launch(Stream stream, const RunTable<NormRun>& table, double norm_type, double* workspace,
            double* part) {
  part_kernel<kKind><<<kBlocks, kThreads, 0, stream>>>(table, norm_type, workspace);
  FSDPP_CUDA(cudaGetLastError());
  total_kernel<kKind><<<1, kThreads, 0, stream>>>(workspace, part);
  FSDPP_CUDA(cudaGetLastError());
}

__global__ void clip_kernel(const double* parts, int ranks, double norm_type, double max_norm, double* norm,
                            float* factor) {
  double total = 0;
  for (int r = 0; r < ranks; ++r)
    total = isinf(norm_type) ? join<Kind::largest>(total, parts[r]) : join<Kind::squares>(total, parts[r]);
  if (norm_type == 2.0) {
    total = sqrt(total);
  } else if (!isinf(norm_type) && norm_type != 1.0) {
    total = pow(total, 1.0 / norm_type);
  }
  *norm = total;
  const double wanted = max_norm / (total + 1e-6);
  *factor = static_cast<float>(wanted >= 1.0 ? 1.0 : wanted);
}

void require_norm_type(const char* who, double norm_type) {
  require(norm_type > 0, who, ": norm_type = ", norm_type, "; expected a number above 0, or infinity");
}

}  // namespace

void cuda_norm_part(Stream stream, const NormRun* runs, int run_count, int64_t tiles, double norm_type,
                    double* workspace, double* part) {
  require_norm_type("cuda_norm_part", norm_type);
  const RunTable<NormRun> table = {runs, run_count, tiles};
  if (norm_type == 2.0) return launch<Kind::squares>(stream, table, norm_type, workspace, part);
  if (norm_type == 1.0) return launch<Kind::absolutes>(stream, table, norm_type, workspace, part);
  if (std::isinf(norm_type)) return launch<Kind::largest>(stream, table, norm_type, workspace, part);
  launch<Kind::powers>(stream, table, norm_type, workspace, part);
}

void cuda_clip_factor(Stream stream, const double* parts, int ranks, double norm_type, double max_norm,
                      double* norm, float* factor) {
  require_norm_type("cuda_clip_factor", norm_type);
  require(ranks >= 1, "cuda_clip_factor: ranks = ", ranks, "; expected 1 or more");
  require(max_norm >= 0, "cuda_clip_factor: max_norm = ", max_norm, "; expected 0 or more");
  clip_kernel<<<1, 1, 0, stream>>>(parts, ranks, norm_type, max_norm, norm, factor);
  FSDPP_CUDA(cudaGetLastError());
}

}  // namespace fsdpp::device
