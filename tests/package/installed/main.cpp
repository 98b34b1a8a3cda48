// Four thread ranks meet through an installed fsdpp, and an operator of libtorch runs.
#include <ATen/ops/ones.h>

#include <atomic>
#include <cstdio>

#include "fsdpp/comm/connect.h"
#include "fsdpp/layout/shard_layout.h"

int main() {
  const auto layout = fsdpp::layout::ShardLayout::flat({{"weight", {1000, 33}}, {"bias", {33}}}, 4, 4);
  std::atomic<int64_t> covered = 0;
  fsdpp::comm::run_thread_ranks(4, [&](fsdpp::comm::PeerGroup& group) {
    for (const auto& segment : layout.segments(group.rank())) covered += segment.count;
  });
  const auto sum = at::ones({4, 4}).sum().item<float>();
  std::printf("covered %lld sum %.0f\n", static_cast<long long>(covered.load()), sum);
  return covered == 1000 * 33 + 33 && sum == 16 ? 0 : 1;
}
