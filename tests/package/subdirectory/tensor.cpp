// Runs an operator of libtorch, which it names only through a dispatch.
#include <ATen/ops/ones.h>

#include <cstdio>

#include "fsdpp/layout/shard_layout.h"

int main() {
  const auto layout = fsdpp::layout::ShardLayout::flat({{"weight", {8, 8}}}, 4, 2);
  const auto sum = at::ones({layout.full_numel()}).sum().item<float>();
  std::printf("sum %.0f\n", sum);
  return sum == static_cast<float>(layout.full_numel()) ? 0 : 1;
}
