#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "fsdpp/device/cuda_check.h"
#include "fsdpp/device/cuda_element.cuh"
#include "fsdpp/device/cuda_rows.h"

namespace fsdpp::device {
namespace {

constexpr int kThreads = 256;
// A row that occurs this often is left to the second kernel.
constexpr int64_t kOften = 64;

struct Job {
  RowSums out;
  SortedIds ids;
  const void* gradients[kMaxRowRanks];
  int64_t ends[kMaxRowRanks];  // of each rank's positions among all; behind the last rank: never reached
  int64_t dim;
  float scale;
  bool add;
};

// First element of the gradient row at `position` among all ranks' rows.
template <class T>
__device__ __forceinline__ const T* row_at(const Job& job, int64_t position) {
  int rank = 0;
  int64_t begin = 0;
  while (position >= job.ends[rank]) begin = job.ends[rank++];
  return static_cast<const T*>(job.gradients[rank]) + (position - begin) * job.dim;
}

__device__ __forceinline__ float finish(const Job& job, float before, float sum) {
  const float scaled = __fmul_rn(job.scale, sum);
  return job.add ? __fadd_rn(before, scaled) : scaled;
}

__device__ __forceinline__ bool is_often(const SortedIds& ids, int64_t first, int64_t id) {
  return first + kOften <= ids.total && ids.sorted[first + kOften - 1] == id;
}

// V columns each at the wanted ones of kVectors places of the row at `position`.
template <class T, int V, int kVectors>
__device__ __forceinline__ void load_columns(const Job& job, int64_t position,
                                             const int64_t (&column)[kVectors],
                                             const bool (&wanted)[kVectors], float (&value)[kVectors][V]) {
  const T* const row = row_at<T>(job, position);
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    if (wanted[u]) load_floats<V>(row + column[u], value[u]);
  }
}

template <int V, int kVectors>
__device__ __forceinline__ void add_columns(float (&sum)[kVectors][V], const float (&value)[kVectors][V]) {
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
#pragma unroll
    for (int k = 0; k < V; ++k) sum[u][k] = __fadd_rn(sum[u][k], value[u][k]);
  }
}

// Sums those columns over the occurrences [first, end): two rows' vectors are in flight at a time.
template <class T, int V, int kVectors>
__device__ __forceinline__ void sum_columns(const Job& job, int64_t first, int64_t end,
                                            const int64_t (&column)[kVectors], const bool (&wanted)[kVectors],
                                            float (&sum)[kVectors][V]) {
  const int64_t* const order = job.ids.order;
  load_columns<T, V>(job, order[first], column, wanted, sum);
  int64_t i = first + 1;
  for (; i + 2 <= end; i += 2) {
    float one[kVectors][V];
    float two[kVectors][V];
    load_columns<T, V>(job, order[i], column, wanted, one);
    load_columns<T, V>(job, order[i + 1], column, wanted, two);
    add_columns<V>(sum, one);
    add_columns<V>(sum, two);
  }
  if (i < end) {
    float one[kVectors][V];
    load_columns<T, V>(job, order[i], column, wanted, one);
    add_columns<V>(sum, one);
  }
}

// The row's columns at `column` and every kStride behind it that `out` owns. `row`: its first element within
// `out`.
template <class T, int V>
__device__ __forceinline__ void add_row(const Job& job, int64_t row, int64_t first, int64_t end,
                                        int64_t begin, int64_t stride) {
  constexpr int kVectors = 2;
  int64_t column[kVectors];
  bool wanted[kVectors];
  float before[kVectors][V];
  float sum[kVectors][V];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    column[u] = begin + u * stride;
    wanted[u] = column[u] < job.dim && row + column[u] >= 0 && row + column[u] < job.out.count;
    if (job.add && wanted[u]) load<V>(job.out.sums + row + column[u], before[u]);
  }
  sum_columns<T, V>(job, first, end, column, wanted, sum);
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
#pragma unroll
    for (int k = 0; k < V; ++k) sum[u][k] = finish(job, before[u][k], sum[u][k]);
    if (wanted[u]) store<V>(job.out.sums + row + column[u], sum[u]);
  }
}

// `1 << lane_bits` neighbouring threads take one sorted position, and act if it is the first of its row.
template <class T, int V>
__global__ void __launch_bounds__(kThreads) rare_rows_kernel(const __grid_constant__ Job job, int lane_bits) {
  const int64_t group = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) >> lane_bits;
  if (group >= job.ids.total) return;
  const int64_t id = job.ids.sorted[group];
  const int64_t row = id * job.dim - job.out.begin;
  if (row + job.dim <= 0 || row >= job.out.count) return;
  if (group > 0 && job.ids.sorted[group - 1] == id) return;
  if (is_often(job.ids, group, id)) return;
  int64_t end = group + 1;
  while (end < job.ids.total && job.ids.sorted[end] == id) ++end;
  const int64_t lane = threadIdx.x & ((1U << lane_bits) - 1);
  const int64_t stride = static_cast<int64_t>(V) << lane_bits;
  for (int64_t column = lane * V; column < job.dim; column += 2 * stride)
    add_row<T, V>(job, row, group, end, column, stride);
}

// --- Rows that occur often. A block takes 32 columns. All warps bring the columns of many occurrences into
// shared memory, some stages ahead; one warp adds them up in order, a column a lane: about five clocks per
// occurrence, whatever the memory's latency.

constexpr int kColumns = 32;
constexpr int kStages = 4;
constexpr int kStageBytes = 8192;

template <class T>
constexpr int kStageRows = kStageBytes / (kColumns * static_cast<int>(sizeof(T)));

template <class T>
using Stage = T[kStageRows<T>][kColumns];

// Occurrences [first, end) into the stage, as far as it goes. Columns outside [low, high) are not read.
// kWide: by copies of 16 bytes that go on in the background.
template <class T, bool kWide>
__device__ void fill_stage(Stage<T>& stage, const Job& job, int64_t first, int64_t end, int64_t column,
                           int64_t low, int64_t high) {
  constexpr int kWidth = kWide ? 16 / static_cast<int>(sizeof(T)) : 1;
  constexpr int kPieces = kColumns / kWidth;
  constexpr int kRounds = kStageRows<T> * kPieces / kThreads;
  const int piece = static_cast<int>(threadIdx.x) % kPieces * kWidth;
  const bool wanted = column + piece < high && column + piece + kWidth > low;
  int64_t position[kRounds];
#pragma unroll
  for (int k = 0; k < kRounds; ++k) {
    const int64_t i = first + (k * kThreads + static_cast<int>(threadIdx.x)) / kPieces;
    position[k] = i < end && wanted ? job.ids.order[i] : -1;
  }
#pragma unroll
  for (int k = 0; k < kRounds; ++k) {
    if (position[k] < 0) continue;
    const T* const source = row_at<T>(job, position[k]) + column + piece;
    T* const target = &stage[(k * kThreads + static_cast<int>(threadIdx.x)) / kPieces][piece];
    if constexpr (kWide) {
      __pipeline_memcpy_async(target, source, 16);
    } else {
      *target = *source;
    }
  }
}

template <class T>
__device__ __forceinline__ float add_stage(const Stage<T>& stage, int rows, int lane, float sum, bool set) {
  int k = 0;
  if (set) sum = to_float(stage[k++][lane]);
  for (; k + 8 <= rows; k += 8) {
    float value[8];
#pragma unroll
    for (int a = 0; a < 8; ++a) value[a] = to_float(stage[k + a][lane]);
#pragma unroll
    for (int a = 0; a < 8; ++a) sum = __fadd_rn(sum, value[a]);
  }
  for (; k < rows; ++k) sum = __fadd_rn(sum, to_float(stage[k][lane]));
  return sum;
}

// The block's columns of the row `id`, whose occurrences are [first, end).
template <class T, bool kWide>
__device__ void sum_often(Stage<T>* stages, const Job& job, int64_t id, int64_t first, int64_t end,
                          int64_t column) {
  const int64_t row = id * job.dim - job.out.begin;
  const int64_t low = max(static_cast<int64_t>(0), -row);  // columns that we own: [low, high)
  const int64_t high = min(job.dim, job.out.count - row);
  if (column >= high || column + kColumns <= low) return;
  constexpr int64_t kRows = kStageRows<T>;
  const int64_t rounds = (end - first + kRows - 1) / kRows;
  for (int s = 0; s < kStages - 1; ++s) {
    fill_stage<T, kWide>(stages[s], job, first + s * kRows, end, column, low, high);
    __pipeline_commit();
  }
  float sum = 0;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t round = 0; round < rounds; ++round) {
    __pipeline_wait_prior(kStages - 2);
    __syncthreads();  // this round's stage is there, and nobody reads the one before it any more
    const int64_t begin = first + round * kRows;
    fill_stage<T, kWide>(stages[(round + kStages - 1) % kStages], job, begin + (kStages - 1) * kRows, end,
                         column, low, high);
    __pipeline_commit();
    if (threadIdx.x < 32)
      sum = add_stage<T>(stages[round % kStages], static_cast<int>(min(kRows, end - begin)), lane, sum,
                         round == 0);
  }
  if (threadIdx.x < 32 && column + lane >= low && column + lane < high) {
    float* const target = job.out.sums + row + column + lane;
    *target = finish(job, job.add ? *target : 0.0F, sum);
  }
  __pipeline_wait_prior(0);
  __syncthreads();  // before the next row fills the stages
}

// First position whose id is not less than `id` (kUpper: greater), within [low, high].
template <bool kUpper>
__device__ int64_t bound(const SortedIds& ids, int64_t id, int64_t low, int64_t high) {
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    const bool before = kUpper ? ids.sorted[middle] <= id : ids.sorted[middle] < id;
    if (before) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// A row of kOften occurrences has one at a multiple of kOften; the first such finds it. blockIdx.x takes 32
// of those positions, blockIdx.y the columns.
template <class T, bool kWide>
__global__ void __launch_bounds__(kThreads) often_rows_kernel(const __grid_constant__ Job job) {
  __shared__ alignas(16) Stage<T> stages[kStages];
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kColumns;
  const int64_t base = static_cast<int64_t>(blockIdx.x) * 32 * kOften;
  const int64_t mine = base + static_cast<int64_t>(threadIdx.x % 32) * kOften;
  bool found = false;
  if (mine < job.ids.total) {
    const int64_t id = job.ids.sorted[mine];
    const int64_t row = id * job.dim - job.out.begin;
    found = row + job.dim > 0 && row < job.out.count && (mine == 0 || job.ids.sorted[mine - kOften] != id);
    if (found) found = is_often(job.ids, bound<false>(job.ids, id, max(int64_t{0}, mine - kOften), mine), id);
  }
  for (unsigned left = __ballot_sync(0xffffffffU, found); left != 0; left &= left - 1) {
    const int64_t at = base + (__ffs(static_cast<int>(left)) - 1) * kOften;
    const int64_t id = job.ids.sorted[at];
    const int64_t first = bound<false>(job.ids, id, max(int64_t{0}, at - kOften), at);
    const int64_t end = bound<true>(job.ids, id, at, job.ids.total);
    sum_often<T, kWide>(stages, job, id, first, end, column);
  }
}

bool all_aligned(const RowGradients& gradients, std::uintptr_t bytes) {
  bool aligned = true;
  for (int r = 0; r < gradients.ranks; ++r) aligned = aligned && is_aligned(gradients.gradients[r], bytes);
  return aligned;
}

template <class T, int V>
void launch_rare(Stream stream, const Job& job) {
  int lane_bits = 0;
  while (lane_bits < 8 && (static_cast<int64_t>(V) << lane_bits) < job.dim) ++lane_bits;
  const int64_t groups_per_block = kThreads >> lane_bits;
  const auto blocks = static_cast<unsigned>((job.ids.total + groups_per_block - 1) / groups_per_block);
  rare_rows_kernel<T, V><<<blocks, kThreads, 0, stream>>>(job, lane_bits);
  FSDPP_CUDA(cudaGetLastError());
}

template <class T, bool kWide>
void launch_often(Stream stream, const Job& job) {
  constexpr int64_t kPerBlock = 32 * kOften;
  const dim3 grid(static_cast<unsigned>((job.ids.total + kPerBlock - 1) / kPerBlock),
                  static_cast<unsigned>((job.dim + kColumns - 1) / kColumns));
  often_rows_kernel<T, kWide><<<grid, kThreads, 0, stream>>>(job);
  FSDPP_CUDA(cudaGetLastError());
}

}  // namespace

void cuda_add_rows(Stream stream, const RowSums& out, const SortedIds& ids, const RowGradients& gradients,
                   float scale, bool add_to_out) {
  if (ids.total == 0 || gradients.dim == 0 || out.count == 0) return;
  Job job{out, ids, {}, {}, gradients.dim, scale, add_to_out};
  int64_t end = 0;
  for (int r = 0; r < gradients.ranks; ++r) {
    job.gradients[r] = gradients.gradients[r];
    job.ends[r] = end += gradients.counts[r];
  }
  with_element(gradients.element, [&]<class T>(T*) {
    const bool vectors = job.dim % 4 == 0 && out.begin % 4 == 0 && out.count % 4 == 0 &&
                         is_aligned(out.sums, 16) && all_aligned(gradients, 4 * sizeof(T));
    if (vectors) {
      launch_rare<T, 4>(stream, job);
    } else {
      launch_rare<T, 1>(stream, job);
    }
    if (ids.total < kOften) return;
    const bool wide = job.dim * static_cast<int64_t>(sizeof(T)) % 16 == 0 && all_aligned(gradients, 16);
    if (wide) {
      launch_often<T, true>(stream, job);
    } else {
      launch_often<T, false>(stream, job);
    }
  });
}

}  // namespace fsdpp::device
