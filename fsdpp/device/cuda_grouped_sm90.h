#pragma once

#include <cstdint>

#include "fsdpp/device/cuda_grouped.h"

namespace fsdpp::device {

/// Most groups of one launch: their outputs travel as a parameter of the kernel.
inline constexpr int kGroupsPerLaunch = 128;

/// The groups of one launch, as the kernels take them: by value.
struct GroupTable {
  float* out[kGroupsPerLaunch];
  uint32_t add[kGroupsPerLaunch / 32];  // a bit per group
  const int32_t* offsets;               // of all groups of the call
  int first;                            // the launch's first group
  int count;                            // its groups
  int rows;
  float kept;
  float scale;
};

/// Whether Hopper's tensor cores can do this product: bf16 or fp16, m and n multiples of 8, left, right and
/// every out[] of `table` aligned to 16 bytes (what the copy engine asks for), a current device of compute
/// capability 9.0, and kernels compiled for it (target sm_90a, not sm_90).
[[nodiscard]] bool grouped_sm90_suits(const GroupedProduct& product, const GroupTable& table);

/// The groups of `table`, where grouped_sm90_suits().
void grouped_sm90(Stream stream, const GroupedProduct& product, const GroupTable& table);

}  // namespace fsdpp::device
