#pragma once

#include <cstdint>
#include <span>

#include "fsdpp/base/error.h"

namespace fsdpp::device {

/// Elements that one block takes at a time. Runs are cut into tiles of this size, and tiles are dealt to the
/// blocks like cards: a long run is spread over all of them, and a hundred short ones take a turn each.
inline constexpr int64_t kTile = 4096;

/// Fills `first_tile` of every run: the tiles of the runs before it. Returns the tiles of all. The table is
/// then copied to the device; it depends on the counts alone. Throws UsageError for a count below 0.
template <class Run>
int64_t place_tiles(std::span<Run> runs) {
  int64_t tiles = 0;
  for (Run& run : runs) {
    require(run.count >= 0, "place_tiles: a run of ", run.count, " elements; expected 0 or more");
    run.first_tile = tiles;
    tiles += (run.count + kTile - 1) / kTile;
  }
  return tiles;
}

}  // namespace fsdpp::device
