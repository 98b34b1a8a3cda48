#pragma once

#include <cstdint>

#include "fsdpp/device/runs.h"

namespace fsdpp::device {

/// A table of runs in device memory.
template <class Run>
struct RunTable {
  const Run* runs;
  int count;
  int64_t tiles;
};

/// Index of the run that owns `tile`: the last whose first tile is not behind it. Empty runs own none.
template <class Run>
__device__ inline int owner_of(const RunTable<Run>& table, int64_t tile) {
  int low = 0;
  int high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (table.runs[middle].first_tile <= tile ? low : high) = middle;
  }
  return low;
}

/// Calls body(run, begin, end) for every tile of this block: the elements [begin, end) of `run`.
/// begin_run(run) is called before the first tile of each run. All threads of the block go through it
/// together.
template <class Run, class BeginRun, class Body>
__device__ __forceinline__ void for_each_tile(const RunTable<Run>& table, BeginRun begin_run, Body body) {
  int64_t run_end = 0;  // first tile behind the run at hand
  Run run{};
  for (int64_t tile = blockIdx.x; tile < table.tiles; tile += gridDim.x) {
    if (tile >= run_end) {
      const int index = owner_of(table, tile);
      run = table.runs[index];
      run_end = index + 1 < table.count ? table.runs[index + 1].first_tile : table.tiles;
      begin_run(run);
    }
    const int64_t begin = (tile - run.first_tile) * kTile;
    body(run, begin, begin + kTile < run.count ? begin + kTile : run.count);
  }
}

/// Elements from `pointer` to the next multiple of 16 bytes.
__device__ inline int to_aligned(const float* pointer) {
  return static_cast<int>((16 - reinterpret_cast<std::uintptr_t>(pointer) % 16) % 16 / sizeof(float));
}

}  // namespace fsdpp::device
