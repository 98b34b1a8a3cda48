#include <algorithm>

#include "fsdpp/device/cuda_check.h"
#include "fsdpp/device/cuda_element.cuh"
#include "fsdpp/device/cuda_rows.h"

namespace fsdpp::device {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // words in flight

// The table in words of kBytes: none of them lies across a cut or the end of a row.
struct Words {
  const void* shards[kMaxRowRanks];
  int64_t shard_words;
  int64_t row_words;
  int64_t rows;
};

// `1 << lane_bits` neighbouring threads copy kUnroll words each of one row; blockIdx.y says which piece of
// it.
template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(Word<kBytes>* out, const int64_t* ids, int64_t count, const __grid_constant__ Words table,
                  int lane_bits) {
  using W = Word<kBytes>;
  const int lanes = 1 << lane_bits;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t i = (static_cast<int64_t>(blockIdx.x) << (8 - lane_bits)) + (threadIdx.x >> lane_bits);
  static_assert(kThreads == 1 << 8);
  if (i >= count) return;
  const int64_t id = ids[i];
  if (id < 0 || id >= table.rows) __trap();
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kUnroll * lanes + lane;
  const int64_t row = id * table.row_words;
  const int64_t row_shard = row / table.shard_words;
  W word[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t j = first + static_cast<int64_t>(u) * lanes;
    int64_t shard = row_shard;
    int64_t offset = row - row_shard * table.shard_words + j;
    if (j < table.row_words) {
      for (; offset >= table.shard_words; ++shard) offset -= table.shard_words;
      word[u] = __ldcs(static_cast<const W*>(table.shards[shard]) + offset);
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t j = first + static_cast<int64_t>(u) * lanes;
    if (j < table.row_words) out[i * table.row_words + j] = word[u];
  }
}

template <int kBytes>
void launch(Stream stream, void* out, const int64_t* ids, int64_t count, const RowTable& table) {
  const auto size = static_cast<int64_t>(element_size(table.element));
  Words words{};
  std::copy(std::begin(table.shards), std::end(table.shards), words.shards);
  words.shard_words = table.shard_elements * size / kBytes;
  words.row_words = table.dim * size / kBytes;
  words.rows = table.rows;
  int lane_bits = 0;
  while (lane_bits < 8 && (static_cast<int64_t>(kUnroll) << lane_bits) < words.row_words) ++lane_bits;
  const int64_t per_piece = static_cast<int64_t>(kUnroll) << lane_bits;
  const int64_t rows_per_block = kThreads >> lane_bits;
  const dim3 grid(static_cast<unsigned>((count + rows_per_block - 1) / rows_per_block),
                  static_cast<unsigned>((words.row_words + per_piece - 1) / per_piece));
  gather_kernel<kBytes>
      <<<grid, kThreads, 0, stream>>>(static_cast<Word<kBytes>*>(out), ids, count, words, lane_bits);
  FSDPP_CUDA(cudaGetLastError());
}

}  // namespace

void cuda_gather_rows(Stream stream, void* out, const int64_t* ids, int64_t count, const RowTable& table) {
  if (count == 0 || table.dim == 0) return;
  const auto size = static_cast<int64_t>(element_size(table.element));
  std::uintptr_t all = static_cast<std::uintptr_t>(table.dim * size) |
                       static_cast<std::uintptr_t>(table.shard_elements * size) |
                       reinterpret_cast<std::uintptr_t>(out);
  for (const void* const shard : table.shards) all |= reinterpret_cast<std::uintptr_t>(shard);
  if (all % 16 == 0) return launch<16>(stream, out, ids, count, table);
  if (all % 8 == 0) return launch<8>(stream, out, ids, count, table);
  if (all % 4 == 0) return launch<4>(stream, out, ids, count, table);
  launch<2>(stream, out, ids, count, table);
}

}  // namespace fsdpp::device
