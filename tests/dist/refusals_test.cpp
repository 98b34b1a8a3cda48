// What docs/strategies.md says does not go together is refused, by an error that names both sides; and no
// other row stands there.
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fsdpp/comm/lanes.h"
#include "fsdpp/comm/mesh_group.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::refusals_test {
namespace {

using Pair = std::pair<std::string, std::string>;  // the first two columns

// The rows under "What does not go together", without the backticks.
std::vector<Pair> documented() {
  std::ifstream file(FSDPP_DOCS "/strategies.md");
  EXPECT_TRUE(file.good()) << FSDPP_DOCS "/strategies.md";
  std::vector<Pair> rows;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("## ")) inside = line == "## What does not go together";
    if (!inside || !line.starts_with("| ") || line.starts_with("| option")) continue;
    std::erase(line, '`');
    const std::size_t second = line.find(" | ", 2);
    const std::size_t third = line.find(" | ", second + 3);
    rows.emplace_back(line.substr(2, second - 2), line.substr(second + 3, third - second - 3));
  }
  return rows;
}

struct Refusal {
  Options options;
  std::vector<layout::Axis> axes;  // of the mesh; empty: none is given
  std::vector<std::string> named;  // in the error
};

std::map<Pair, Refusal> refusals() {
  const std::vector<layout::Axis> hybrid = {{"replicate", 2}, {"shard", 1}};
  const auto wire = [](Strategy strategy, at::ScalarType dtype) {
    return Options{.strategy = strategy, .wire_dtype = dtype};
  };
  const auto parted = [](Strategy strategy) {
    return Options{.strategy = strategy, .shard_optimizer_over_replicas = true};
  };
  const Strategy all = Strategy::optim_grads_params;
  return {
      {{"wire_dtype = bf16", "no_shard with accumulation_dtype = fp32"},
       {wire(Strategy::no_shard, at::kBFloat16), {}, {"wire_dtype BFloat16", "no_shard"}}},
      {{"wire_dtype = bf16", "optim with accumulation_dtype = fp32"},
       {wire(Strategy::optim, at::kBFloat16), {}, {"wire_dtype BFloat16", "strategy optim"}}},
      {{"wire_dtype = fp16", "any strategy"},
       {wire(all, at::kHalf), {}, {"wire_dtype is Half", "Float or BFloat16"}}},
      {{"shard_optimizer_over_replicas", "a flat mesh"},
       {parted(all), {}, {"shard_optimizer_over_replicas", "no replicas"}}},
      {{"shard_optimizer_over_replicas", "no_shard"},
       {parted(Strategy::no_shard), hybrid, {"shard_optimizer_over_replicas", "no_shard"}}},
      {{"offload", "no_shard"},
       {{.strategy = Strategy::no_shard, .offload = true}, {}, {"offload", "no_shard"}}},
      {{"offload", "main_weights = model_dtype"},
       {{.strategy = all, .main_weights = runtime::MainWeights::model_dtype, .offload = true},
        {},
        {"offload", "main_weights"}}},
      {{"accumulation_dtype = fp16", "any strategy"},
       {{.strategy = all, .accumulation_dtype = at::kHalf}, {}, {"accumulation_dtype is Half"}}},
      {{"accumulation_dtype = bf16", "a mesh with replicas"},
       {{.strategy = all, .accumulation_dtype = at::kBFloat16},
        hybrid,
        {"accumulation_dtype BFloat16", "\"replicate\""}}},
      {{"accumulation_dtype = bf16", "offload"},
       {{.strategy = all, .accumulation_dtype = at::kBFloat16, .offload = true},
        {},
        {"accumulation_dtype BFloat16", "offload"}}},
      {{"reshard_after_forward = n", "no_shard, optim or optim_grads"},
       {{.strategy = Strategy::optim_grads, .reshard_after_forward = 2},
        {},
        {"reshard_after_forward = 2", "strategy optim_grads"}}},
      {{"reshard_after_forward = n", "ranks that n does not divide"},
       {{.strategy = all, .reshard_after_forward = 3}, {}, {"reshard_after_forward = 3", "over 2 ranks"}}},
      {{"a mesh with other axes", "any strategy"},
       {{.strategy = all}, {{"column", 2}, {"shard", 1}}, {"'column'", "\"replicate\" and \"shard\""}}},
  };
}

TEST(Refusals, Case22EachRowOfTheTableIsRefusedByName) {
  const std::map<Pair, Refusal> known = refusals();
  const std::vector<Pair> rows = documented();
  EXPECT_EQ(rows.size(), known.size());
  for (const Pair& row : rows) {
    const auto found = known.find(row);
    ASSERT_NE(found, known.end()) << "no test for: " << row.first << " with " << row.second;
    const Refusal& refusal = found->second;
    run_watched_ranks(2, [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(1, 8, Layers::fused);
      const std::string error = thrown_text([&] {
        if (refusal.axes.empty()) {
          static_cast<void>(fully_shard(group, net, net->units(), refusal.options));
        } else {
          comm::MeshGroup mesh(group, layout::Mesh(refusal.axes));
          static_cast<void>(fully_shard(mesh, net, net->units(), refusal.options));
        }
      });
      for (const std::string& name : refusal.named) expect_in(error, name);
    });
  }
}

// What the table leaves.
TEST(Refusals, Case22ABf16WireGoesWithBf16Sums) {
  for (const Strategy strategy : {Strategy::no_shard, Strategy::optim}) {
    run_watched_ranks(2, [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(1, 8, Layers::fused);
      comm::MeshGroup mesh(group, layout::Mesh({{"replicate", 1}, {"shard", 2}}));
      const auto model = watched_shard(
          mesh, net, net->units(),
          {.strategy = strategy, .accumulation_dtype = at::kBFloat16, .wire_dtype = at::kBFloat16});
      small_loss(net->run(small_batch(8, group.rank()))).backward();
      EXPECT_EQ(model->shards().front().grad().scalar_type(), at::kBFloat16);
    });
  }
}

// Lanes that cannot address each other's memory, as far as set-up gets.
class LibraryLanes final : public comm::LaneTransport, public comm::Collectives {
 public:
  std::shared_ptr<comm::PeerMemory> allocate(std::size_t, const std::string&) override { return nullptr; }
  std::unique_ptr<comm::LaneSignals> signals(std::vector<std::string>, const std::string&) override {
    return nullptr;
  }
  [[nodiscard]] comm::Collectives* collectives() noexcept override { return this; }
  [[nodiscard]] std::string describe() const override { return "a library"; }
  void all_gather(void*, const void*, std::size_t) override {}
  void reduce_scatter(float*, const float*, int64_t) override {}
};

TEST(Refusals, Case22ABf16WireOverALibrarysCollectivesNamesBoth) {
  run_watched_ranks(2, [](comm::PeerGroup& group) {
    group.set_lanes(std::make_unique<LibraryLanes>());
    const auto net = std::make_shared<SmallNet>(1, 8, Layers::fused);
    const Options options{.wire_dtype = at::kBFloat16};
    const std::string error =
        thrown_text([&] { static_cast<void>(fully_shard(group, net, net->units(), options)); });
    expect_in(error, "wire_dtype BFloat16");
    expect_in(error, "a library");
  });
}

}  // namespace
}  // namespace fsdpp::test::refusals_test
