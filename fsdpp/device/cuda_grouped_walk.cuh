#pragma once

#include <cstdint>

#include "fsdpp/device/cuda_grouped_sm90.h"
#include "fsdpp/device/cuda_hopper.cuh"

// Which tiles of the outputs which cluster of two blocks computes, and in what order.
namespace fsdpp::device {

constexpr int kTileM = 128;  // 64 for each of two warpgroups
constexpr int kTileN = 256;  // the widest of one instruction
constexpr int kDepth = 64;   // rows of a stage

// Pairs of tiles below each other that go before the next column: what 66 clusters do at a time is near a
// square (2048 x 2112 outputs), so that few rows of the inputs serve many of them from the L2 cache.
constexpr int kBandPairs = 8;

struct Grid {
  int m;
  int n;
  int pairs_m;  // of tiles below each other
  int tiles_n;
};

// The launch's groups, in shared memory.
struct Groups {
  int begin[kGroupsPerLaunch];
  int rows[kGroupsPerLaunch];
  uint8_t order[kGroupsPerLaunch];
};

struct Tile {
  int group;
  int row0;     // of the output
  int column0;  // of the output
  int begin;    // the group's first row
  int rows;     // the group's

  // A group without rows has one stage too: of zeros.
  __device__ int stages() const { return max(1, (rows + kDepth - 1) / kDepth); }
};

__device__ inline bool adds(const GroupTable& table, int group) {
  return (table.add[group / 32] >> (group % 32) & 1U) != 0;
}

// Groups in order of falling size, so that clusters end at about the same time whatever the sizes. Returns
// how many have work; those that add nothing are left out.
__device__ inline int order_groups(Groups& groups, const GroupTable& table) {
  const auto i = static_cast<int>(threadIdx.x);
  int rows = -1;
  if (i < table.count) {
    const int g = table.first + i;
    const int begin = min(g > 0 ? table.offsets[g - 1] : 0, table.rows);
    rows = min(table.offsets[g], table.rows) - begin;
    if (rows == 0 && adds(table, i) && table.kept == 1.0F) rows = -1;
    groups.begin[i] = begin;
    groups.rows[i] = rows;
  }
  const int active = __syncthreads_count(rows >= 0);
  if (i < table.count) {
    int place = 0;
    for (int j = 0; j < table.count; ++j)
      place += groups.rows[j] > rows || (groups.rows[j] == rows && j < i) ? 1 : 0;
    groups.order[place] = static_cast<uint8_t>(i);
  }
  __syncthreads();
  return active;
}

// This block's tiles, in turn. Every second round of the clusters goes backwards: who had the larger group
// has the smaller one next.
class Walk {
 public:
  __device__ Walk(const Grid& grid, const Groups& groups, int active)
      : grid_(grid), groups_(groups), items_(active * grid.pairs_m * grid.tiles_n) {}

  __device__ bool next(Tile& tile) {
    const auto clusters = static_cast<int>(gridDim.x / 2);
    const auto cluster = static_cast<int>(blockIdx.x / 2);
    const int item = round_ * clusters + (round_ % 2 != 0 ? clusters - 1 - cluster : cluster);
    if (item >= items_) return false;
    ++round_;
    const int of_group = grid_.pairs_m * grid_.tiles_n;
    const int of_band = kBandPairs * grid_.tiles_n;
    const int in_group = item % of_group;
    const int band = in_group / of_band;
    const int in_band = in_group % of_band;
    const int pairs = min(kBandPairs, grid_.pairs_m - band * kBandPairs);
    const int pair = band * kBandPairs + in_band % pairs;
    tile.group = groups_.order[item / of_group];
    tile.row0 = (2 * pair + static_cast<int>(hopper::cluster_rank())) * kTileM;
    tile.column0 = in_band / pairs * kTileN;
    tile.begin = groups_.begin[tile.group];
    tile.rows = groups_.rows[tile.group];
    return true;
  }

 private:
  const Grid& grid_;
  const Groups& groups_;
  int items_;
  int round_ = 0;
};

}  // namespace fsdpp::device
