// Cases of dtypes, padding, first weights and figures (numbers: the project's list of cases).
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/floor.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include "fsdpp/layout/shard_layout.h"
#include "fsdpp/nn/llama.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::cases_numbers_test {
namespace {

constexpr int64_t kDim = 8;
using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

class CasesOfNumbers : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Strategies, CasesOfNumbers, all_ranks(), parameters_name);

// One unit with weights of two dtypes; integers small enough for both.
class TwoDtypes : public torch::nn::Module {
 public:
  TwoDtypes() {
    wide = register_module("wide", std::make_shared<SmallLinear>(6, 5, Layers::fused, 11));
    narrow = register_module("narrow", std::make_shared<SmallLinear>(6, 7, Layers::fused, 12));
    narrow->to(at::kBFloat16);
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& input) const {
    const auto of = [&](const SmallLinear& layer) {
      return small_loss(layer.forward(input.to(layer.weight.scalar_type())).to(at::kFloat));
    };
    return of(*wide) + of(*narrow);
  }
  std::shared_ptr<SmallLinear> wide, narrow;
};

TEST_P(CasesOfNumbers, Case24TwoDtypesInOneUnit) {
  for (const bool converted : {false, true}) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const auto module = std::make_shared<TwoDtypes>();
      Options chosen = options();
      if (converted) chosen.model_dtype = at::kBFloat16;
      const auto model = watched_shard(group, module, Modules{}, chosen);
      TwoDtypes oracle;
      oracle.narrow->to(at::kFloat);
      const auto dtype_of = [&](const std::string& name) {
        return converted || name.starts_with("narrow") ? at::kBFloat16 : at::kFloat;
      };
      for (int step = 0; step < 2; ++step) {
        call(*module, small_batch(6, group.rank(), step)).backward();
        for (const at::Tensor& batch : all_batches(6, ranks(), step)) oracle.forward(batch).backward();
        expect_gradients(*model, oracle);
        const auto names = model->parameters();
        const std::vector<at::Tensor> weights = model->full_weights();
        for (std::size_t i = 0; i < names.size(); ++i) {
          const std::string& name = names[i].first;
          const at::Tensor shard = model->shards()[i];
          EXPECT_EQ(shard.scalar_type(), at::kFloat) << name;
          EXPECT_EQ(shard.grad().scalar_type(), at::kFloat) << name;
          EXPECT_EQ(weights[i].scalar_type(), dtype_of(name)) << name;
          EXPECT_EQ(module->named_parameters()[name].scalar_type(), dtype_of(name)) << name;
          expect_same(weights[i].to(at::kFloat), oracle.named_parameters()[name], name);
        }
        integer_step(model->shards());
        integer_step(oracle.parameters());
        model->zero_grad();
        clear(oracle);
      }
      const at::NoGradGuard no_grad;
      for (int time = 0; time < 4; ++time) {  // each too small for bf16, not all four
        for (at::Tensor shard : model->shards()) shard.add_(1.0F / 1024);
      }
      for (const at::Tensor& shard : model->shards())
        EXPECT_TRUE(at::equal(shard - at::floor(shard), at::full_like(shard, 4.0F / 1024)));
    });
  }
}

using Nested = std::map<std::string, std::vector<at::Tensor>>;
using Outputs = std::tuple<at::Tensor, std::map<std::string, std::optional<Nested>>>;

// Takes and gives containers of containers, and adds positions of which bf16 would lose the fraction.
class NestedUnit : public torch::nn::Module {
 public:
  explicit NestedUnit(Layers layers) {
    block = register_module("block", std::make_shared<SmallBlock>(kDim, layers, 3));
    positions = register_buffer("positions", at::arange(4, at::kFloat) + 1.0F / 4096);
  }
  [[nodiscard]] Outputs forward(const Nested& inputs) const {
    const at::Tensor& input = inputs.at("given").at(1);
    const at::Tensor whole = at::floor(positions).to(input.scalar_type());
    const at::Tensor result = block->forward(input + whole.narrow(0, 2, 1));
    return {input, {{"nothing", std::nullopt}, {"deep", Nested{{"results", {input, result}}}}}};
  }
  std::shared_ptr<SmallBlock> block;
  at::Tensor positions;
};

class NestedNet : public torch::nn::Module {
 public:
  explicit NestedNet(Layers layers) : kind(layers) {
    unit = register_module("unit", std::make_shared<NestedUnit>(layers));
    last = register_module("last", std::make_shared<SmallLinear>(kDim, kDim, layers, 9));
  }
  [[nodiscard]] Outputs forward(const Nested& inputs) const {
    const Outputs middle = kind == Layers::oracle ? unit->forward(inputs) : fsdpp::call(*unit, inputs);
    const at::Tensor result = std::get<1>(middle).at("deep")->at("results").at(1);
    return {inputs.at("given").at(0), {{"deep", Nested{{"results", {last->forward(result)}}}}}};
  }
  Layers kind;
  std::shared_ptr<NestedUnit> unit;
  std::shared_ptr<SmallLinear> last;
};

TEST_P(CasesOfNumbers, Case25NestedContainersAndBuffersThatStayFp32) {
  for (const auto& [dtype, layers] : {std::pair(at::kFloat, Layers::fused),
                                      {at::kFloat, Layers::unfused},
                                      {at::kBFloat16, Layers::fused}}) {
    run_watched_ranks(ranks(), [&, dtype = dtype, layers = layers](comm::PeerGroup& group) {
      const auto net = std::make_shared<NestedNet>(layers);
      Options chosen = options();
      chosen.model_dtype = dtype;
      const auto model = watched_shard(group, net, Modules{net->unit}, chosen);
      NestedNet oracle(Layers::oracle);
      const at::Tensor positions = oracle.unit->positions.clone();
      const auto loss_of = [](const Outputs& outputs) {
        return small_loss(std::get<1>(outputs).at("deep")->at("results").at(0).to(at::kFloat));
      };
      for (int step = 0; step < 2; ++step) {
        const auto inputs = [&](int rank, at::ScalarType of) {
          const at::Tensor batch = small_batch(kDim, rank, step).to(of);
          return Nested{{"given", {batch * 2, batch}}};
        };
        loss_of(call(*net, inputs(group.rank(), dtype))).backward();
        EXPECT_TRUE(model->at_rest());
        for (int rank = 0; rank < ranks(); ++rank)
          loss_of(oracle.forward(inputs(rank, at::kFloat))).backward();
        expect_gradients(*model, oracle);
        EXPECT_EQ(net->unit->block->up->weight.scalar_type(), dtype);
        for (const at::Tensor& buffer : net->buffers()) expect_same(buffer, positions, "buffer");
        EXPECT_EQ(net->unit->positions.scalar_type(), at::kFloat);
        model->zero_grad();
        clear(oracle);
      }
      EXPECT_EQ(model->counters().on_demand_gathers, 0) << "each backward began at an output's hook";
    });
  }
}

using Shapes = std::vector<layout::Shape>;

// Units as published: Llama 3 (Grattafiori et al. 2024), table 3; kv heads of 128 times 8.
Shapes llama_block(int64_t dim, int64_t ffn) {
  return {{"q", {dim, dim}},    {"k", {1024, dim}},   {"v", {1024, dim}},
          {"o", {dim, dim}},    {"gate", {ffn, dim}}, {"up", {ffn, dim}},
          {"down", {dim, ffn}}, {"norm1", {dim}},     {"norm2", {dim}}};
}

Shapes llama_root(int64_t dim) {
  return {{"table", {128256, dim}}, {"head", {128256, dim}}, {"norm", {dim}}};
}

// DeepSeek-V3 (2024), section 4.2: width 7168, 128 heads, latents of 1536 and 512, experts of 2048.
Shapes deepseek_block(bool dense) {
  constexpr int64_t kWidth = 7168;
  Shapes shapes = {{"q_a", {1536, kWidth}}, {"q_a_norm", {1536}}, {"q_b", {24576, 1536}},
                   {"kv_a", {576, kWidth}}, {"kv_a_norm", {512}}, {"kv_b", {32768, 512}},
                   {"o", {kWidth, 16384}},  {"norm1", {kWidth}},  {"norm2", {kWidth}}};
  const auto feed_forward = [&](const std::string& name, int64_t ffn) {
    shapes.push_back({name + ".gate", {ffn, kWidth}});
    shapes.push_back({name + ".up", {ffn, kWidth}});
    shapes.push_back({name + ".down", {kWidth, ffn}});
  };
  if (dense) {
    feed_forward("dense", 18432);
    return shapes;
  }
  feed_forward("shared", 2048);
  shapes.push_back({"router", {256, kWidth}});
  shapes.push_back({"router_bias", {256}});
  for (int expert = 0; expert < 256; ++expert) feed_forward(text("expert", expert), 2048);
  return shapes;
}

TEST(CasesOfPadding, Case28AtMostOnePercentOfPublishedShapes) {
  const std::map<std::string, Shapes> units = {
      {"Llama-3 8B block", llama_block(4096, 14336)},    {"Llama-3 8B root", llama_root(4096)},
      {"Llama-3 70B block", llama_block(8192, 28672)},   {"Llama-3 70B root", llama_root(8192)},
      {"Llama-3 405B block", llama_block(16384, 53248)}, {"Llama-3 405B root", llama_root(16384)},
      {"DeepSeek-V3 dense block", deepseek_block(true)}, {"DeepSeek-V3 block", deepseek_block(false)},
      {"rows of 18432", {{"weight", {7168, 18432}}}},    {"rows of 16384", {{"weight", {7168, 16384}}}},
      {"rows of 7168", {{"weight", {18432, 7168}}}}};
  for (const auto& [name, shapes] : units) {
    double worst = 0;
    for (const int64_t bytes : {2, 4}) {
      for (int ranks = 8; ranks <= 64; ++ranks) {
        if (shapes.size() > 100 && ranks % 8 != 0) continue;  // of many experts, some counts will do
        const auto layout = layout::ShardLayout::flat(shapes, bytes, ranks);
        const double padding = static_cast<double>(layout.padding_numel());
        worst = std::max(worst, padding / static_cast<double>(layout.full_numel() - layout.padding_numel()));
      }
    }
    EXPECT_LE(worst, 0.01) << name;
    std::cout << "padding: " << name << ": at most " << 100 * worst << " % on 8 to 64 ranks\n";
  }
}

TEST_P(CasesOfNumbers, Case28PaddingIsReported) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, 33, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), options());
    const auto units = model->units();
    ASSERT_EQ(units.size(), 3U);
    for (const auto& unit : units) {
      EXPECT_EQ(unit.parameters, 2 * (33 * 33 + 33)) << unit.name;
      EXPECT_EQ(unit.bytes, unit.parameters * 4 + unit.padding_bytes) << unit.name;
      EXPECT_GT(unit.padding_bytes, 0) << unit.name;
      EXPECT_EQ(unit.bytes % (256 * ranks() / GetParam().replicas), 0) << unit.name;
    }
  });
}

// Ranks' tensors, compared when all have ended.
class Weights {
 public:
  void keep(std::vector<at::Tensor> weights) {
    const std::lock_guard lock(mutex_);
    all_.push_back(std::move(weights));
  }
  void expect_all(const std::vector<at::Tensor>& expected) const {
    for (const auto& weights : all_) {
      ASSERT_EQ(weights.size(), expected.size());
      for (std::size_t i = 0; i < weights.size(); ++i)
        expect_same(weights[i], expected[i], text("weight ", i));
    }
  }
  [[nodiscard]] const std::vector<at::Tensor>& first() const { return all_.at(0); }

 private:
  std::mutex mutex_;
  std::vector<std::vector<at::Tensor>> all_;
};

TEST_P(CasesOfNumbers, Case39RandomFirstWeightsAreThoseOfOneProcess) {
  const nn::LlamaConfig config{
      .vocabulary = 67, .dim = 24, .layers = 2, .heads = 4, .kv_heads = 2, .ffn = 40};
  const auto alone = std::make_shared<nn::Llama>(config, /*seed=*/7);
  Weights weights;
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto llama = std::make_shared<nn::Llama>(config, /*seed=*/7);
    const auto model = watched_shard(group, llama, llama->units(), options());
    weights.keep(model->full_weights());
  });
  std::vector<at::Tensor> expected;
  for (const at::Tensor& weight : alone->parameters()) expected.push_back(weight.detach());
  weights.expect_all(expected);
}

// Every rank draws other weights; the model is one all the same, and stays one.
TEST_P(CasesOfNumbers, Case39ReplicasStartEqualAlsoFromDifferentSeeds) {
  Weights at_first, later;
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto seed = 7 + 10000 * static_cast<uint64_t>(group.rank());
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused, seed);
    const auto model = watched_shard(group, net, net->units(), options());
    at_first.keep(model->full_weights());
    for (int step = 0; step < 2; ++step) {
      small_loss(net->run(small_batch(kDim, group.rank(), step))).backward();
      integer_step(model->shards());
      model->zero_grad();
    }
    later.keep(model->full_weights());
  });
  at_first.expect_all(at_first.first());
  later.expect_all(later.first());
}

// Where each replica brings a part of the shards, only equal seeds have one answer.
TEST_P(CasesOfNumbers, Case39TheFirstReplicasWeightsCount) {
  Weights weights;
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const int shards = sharded() ? ranks() / GetParam().replicas : 1;
    const int other = parted() ? 0 : group.rank() / shards;
    const auto net =
        std::make_shared<SmallNet>(2, kDim, Layers::fused, 7 + 10000 * static_cast<uint64_t>(other));
    const auto model = watched_shard(group, net, net->units(), options());
    weights.keep(model->full_weights());
  });
  weights.expect_all(SmallNet(2, kDim, Layers::oracle).parameters());
}

at::Tensor without_data(int64_t dim, int64_t elements = 0) {
  at::Tensor tensor = at::empty({elements});
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({dim, dim});
  return tensor;
}

// As deferred initialisation leaves a model: some of it was made, and of the rest nothing but the sizes is
// known.
class Deferred : public torch::nn::Module {
 public:
  explicit Deferred(int layers) {
    made = register_parameter("made", integers({3, 3}, 1));
    register_parameter("absent", at::Tensor(), /*requires_grad=*/false);
    register_parameter("nothing", at::empty({0, 3}));
    freed = register_parameter("freed", without_data(3));
    register_buffer("positions", at::empty({4}, at::kMeta));
    for (int i = 0; i < layers; ++i) {
      auto layer = std::make_shared<torch::nn::Module>("Layer");
      layer->register_buffer("shortened", without_data(3, 8));
      layer->register_parameter("weight", at::empty({3, 3}, at::kMeta));
      layer->register_parameter("tied", layer->named_parameters()["weight"]);
      register_module("layer" + std::to_string(i), layer);
    }
  }
  at::Tensor made, freed;
};

TEST_P(CasesOfNumbers, Case40TensorsWithoutDataAreRefusedAndListed) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto refused = [&](const std::shared_ptr<torch::nn::Module>& module, const Modules& units) {
      return thrown_text([&] { static_cast<void>(watched_shard(group, module, units, options())); });
    };
    const auto module = std::make_shared<Deferred>(2);
    const std::string message = refused(module, {module->children()[0]});
    expect_in(message,
              "do): parameter freed, buffer positions, parameter layer0.weight, buffer layer0.shortened, "
              "parameter layer1.weight, buffer layer1.shortened; materialise and initialise them");
    expect_in(refused(std::make_shared<Deferred>(12), {}), "layer8.shortened and 6 more; ");
    expect_same(module->made, integers({3, 3}, 1), "what was not sharded");
    const auto small = std::make_shared<Deferred>(0);
    expect_in(refused(small, {}), "do): parameter freed, buffer positions; ");
    small->freed.set_data(integers({3, 3}, 2));
    expect_in(refused(small, {}), "do): buffer positions; ");
    EXPECT_EQ(runtime::find_unit(*small).unit, -1);
  });
}

// The first refusal has left no trace.
TEST_P(CasesOfNumbers, Case40WhatWasRefusedTrainsOnceItHasData) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    SmallNet oracle(2, kDim, Layers::oracle);
    at::Tensor weight = net->blocks[1]->up->weight;
    const at::Tensor values = weight.detach().clone();
    weight.set_data(without_data(kDim));
    const auto shard = [&] { return watched_shard(group, net, net->units(), options()); };
    expect_in(thrown_text([&] { static_cast<void>(shard()); }), "do): parameter block1.up.weight; ");
    weight.set_data(values);
    const auto model = shard();
    small_loss(net->run(small_batch(kDim, group.rank()))).backward();
    oracle_backward(oracle, all_batches(kDim, ranks()));
    expect_gradients(*model, oracle);
  });
}

// A figure for people: what the runtime costs the host where the model itself costs next to nothing.
TEST(CasesOfFigures, Case49HostTimePerUnitAndStepIsPrinted) {
  using Clock = std::chrono::steady_clock;
  constexpr int kBlocks = 16;
  constexpr int kSteps = 10;
  for (const Strategy strategy : runtime::kStrategies) {
    comm::run_thread_ranks(1, [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(kBlocks, kDim, Layers::fused);
      const auto model = fully_shard(group, net, net->units(), Options{.strategy = strategy});
      SmallNet plain(kBlocks, kDim, Layers::oracle);
      const auto least = [&](SmallNet& of) {
        double seconds = 1e9;
        for (int step = 0; step < kSteps; ++step) {
          const auto begin = Clock::now();
          small_loss(of.run(small_batch(kDim, 0, step))).backward();
          seconds = std::min(seconds, std::chrono::duration<double>(Clock::now() - begin).count());
          model->zero_grad();
          clear(plain);
        }
        return 1e6 * seconds / (kBlocks + 1);
      };
      const double ours = least(*net);
      const double without = least(plain);
      EXPECT_GT(ours, 0);
      std::cout << "host time: " << runtime::to_string(strategy) << ": " << ours
                << " us per unit and step, libtorch alone " << without << " us\n";
    });
  }
}

}  // namespace
}  // namespace fsdpp::test::cases_numbers_test
