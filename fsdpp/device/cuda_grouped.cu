#include <algorithm>
#include <limits>

#include "fsdpp/base/error.h"
#include "fsdpp/device/cuda_check.h"
#include "fsdpp/device/cuda_element.cuh"
#include "fsdpp/device/cuda_grouped.h"
#include "fsdpp/device/cuda_grouped_sm90.h"

namespace fsdpp::device {
namespace {

constexpr int kTile = 64;      // outputs of a block, in both directions
constexpr int kDepth = 16;     // rows that are in shared memory at a time
constexpr int kThreads = 256;  // 16 x 16, of 4 x 4 outputs each
constexpr int kEach = 4;

__host__ __device__ constexpr int64_t tiles_of(int64_t size) { return (size + kTile - 1) / kTile; }

struct Range {
  int begin;
  int end;
};

__device__ Range rows_of(const GroupTable& table, int group) {
  const int g = table.first + group;
  return {min(g > 0 ? table.offsets[g - 1] : 0, table.rows), min(table.offsets[g], table.rows)};
}

// Rows [row, row + kDepth) of columns [column, column + kTile); zeros outside of the matrix and the group.
template <class T>
__device__ void load_tile(float (&tile)[kDepth][kTile], const T* matrix, int row, int end, int64_t column,
                          int64_t columns) {
  for (int i = static_cast<int>(threadIdx.x); i < kDepth * kTile; i += kThreads) {
    const int r = row + i / kTile;
    const int64_t c = column + i % kTile;
    tile[i / kTile][i % kTile] = r < end && c < columns ? to_float(matrix[r * columns + c]) : 0.0F;
  }
}

// One block per tile of one output. Thread (x, y) has columns x, x + 16, ... and rows y, y + 16, ...: reads
// of shared memory without bank conflicts and coalesced writes.
template <class T>
__global__ void __launch_bounds__(kThreads)
    grouped_kernel(const T* left, const T* right, const __grid_constant__ GroupTable table, const int64_t m,
                   const int64_t n) {
  __shared__ float left_tile[kDepth][kTile];
  __shared__ float right_tile[kDepth][kTile];
  const int64_t tiles_n = tiles_of(n);
  const int64_t row0 = blockIdx.x / tiles_n * kTile;
  const int64_t column0 = blockIdx.x % tiles_n * kTile;
  const auto x = static_cast<int>(threadIdx.x % (kTile / kEach));
  const auto y = static_cast<int>(threadIdx.x / (kTile / kEach));
  const auto group = static_cast<int>(blockIdx.y);
  const Range rows = rows_of(table, group);
  float sum[kEach][kEach] = {};
  for (int row = rows.begin; row < rows.end; row += kDepth) {
    load_tile(left_tile, left, row, rows.end, row0, m);
    load_tile(right_tile, right, row, rows.end, column0, n);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          sum[i][j] = __fmaf_rn(left_tile[k][y + i * 16], right_tile[k][x + j * 16], sum[i][j]);
      }
    }
    __syncthreads();
  }
  const bool add = (table.add[group / 32] >> (group % 32) & 1U) != 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t r = row0 + y + i * 16;
      const int64_t c = column0 + x + j * 16;
      if (r >= m || c >= n) continue;
      float* const target = table.out[group] + r * n + c;
      const float scaled = __fmul_rn(table.scale, sum[i][j]);
      *target = add ? __fmaf_rn(table.kept, *target, scaled) : scaled;
    }
  }
}

void launch_plain(Stream stream, const GroupedProduct& product, const GroupTable& table) {
  const int64_t tiles = tiles_of(product.m) * tiles_of(product.n);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(table.count));
  with_element(product.element, [&]<class T>(T*) {
    grouped_kernel<T><<<grid, kThreads, 0, stream>>>(static_cast<const T*>(product.left),
                                                     static_cast<const T*>(product.right), table, product.m,
                                                     product.n);
  });
  FSDPP_CUDA(cudaGetLastError());
}

void check(const GroupedProduct& product, std::size_t outputs, std::size_t flags) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto in_range = [](int64_t size) { return size >= 0 && size < kMost; };
  require(product.first >= 0, "cuda_grouped_products: the first group is ", product.first,
          "; expected 0 or more");
  require(product.groups >= 1, "cuda_grouped_products: ", product.groups, " groups; expected 1 or more");
  require(outputs == static_cast<std::size_t>(product.groups) && flags == outputs,
          "cuda_grouped_products: ", product.groups, " groups, but ", outputs, " outputs and ", flags,
          " flags to add; expected as many of each");
  require(in_range(product.rows) && in_range(product.m) && in_range(product.n),
          "cuda_grouped_products: rows = ", product.rows, ", m = ", product.m, ", n = ", product.n,
          "; expected 0 up to less than ", kMost);
  // Far beyond any memory; 128 outputs' tiles are counted in an int.
  constexpr int64_t kMostTiles = int64_t{1} << 25;
  require(tiles_of(product.m) * tiles_of(product.n) < kMostTiles, "cuda_grouped_products: an output of ",
          product.m, " x ", product.n, " is too large");
}

}  // namespace

void cuda_grouped_products(Stream stream, const GroupedProduct& product, std::span<float* const> out,
                           std::span<const uint8_t> add) {
  check(product, out.size(), add.size());
  if (product.m == 0 || product.n == 0) return;
  for (int first = 0; first < product.groups; first += kGroupsPerLaunch) {
    GroupTable table{};
    table.offsets = product.offsets;
    table.first = product.first + first;
    table.count = std::min(kGroupsPerLaunch, product.groups - first);
    table.rows = static_cast<int>(product.rows);
    table.kept = product.kept;
    table.scale = product.scale;
    for (int g = 0; g < table.count; ++g) {
      table.out[g] = out[first + g];
      if (add[first + g] != 0) table.add[g / 32] |= 1U << (g % 32);
    }
    if (grouped_sm90_suits(product, table)) {
      grouped_sm90(stream, product, table);
    } else {
      launch_plain(stream, product, table);
    }
  }
}

}  // namespace fsdpp::device
