// Uses the parts of fsdpp that need no libtorch.
#include <cstdio>

#include "fsdpp/base/error.h"
#include "fsdpp/layout/shard_layout.h"

int main() {
  try {
    (void)fsdpp::layout::ShardLayout::flat({{"weight", {8, 8}}}, 4, 0);
  } catch (const fsdpp::UsageError& error) {
    std::puts(error.what());
    return fsdpp::layout::ShardLayout::flat({{"weight", {8, 8}}}, 4, 2).shard_numel() >= 32 ? 0 : 1;
  }
  return 1;  // zero ranks must be refused
}
