#include "tests/dist/random_model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <sstream>

namespace fsdpp::test {
namespace {

using nn::Recompute;
using runtime::Reshard;
using runtime::UnitChoice;
using runtime::Use;

constexpr int64_t kWords = 6;

Reshard random_reshard(Draw& draw, int sharding) {
  switch (draw.below(3)) {
    case 0:
      return true;
    case 1:
      return false;
    default:
      return sharding % 2 == 0 ? 2 : draw.one_in(2) ? 1 : sharding;
  }
}

std::vector<UnitChoice> random_choices(Draw& draw, const Options& options, int sharding) {
  std::vector<UnitChoice> choices;
  for (int unit = 0; unit <= RandomNet::kBlocks; ++unit) {
    UnitChoice choice;
    if (draw.one_in(2)) choice.strategy = runtime::kStrategies[static_cast<std::size_t>(draw.below(4))];
    const bool comes_and_goes = shards_parameters(choice.strategy.value_or(options.strategy));
    if (comes_and_goes && draw.one_in(2)) choice.reshard_after_forward = random_reshard(draw, sharding);
    choices.push_back(choice);
  }
  return choices;
}

bool any_unsharded(const RandomConfig& config) {
  const auto unsharded = [](const UnitChoice& choice) { return choice.strategy == Strategy::no_shard; };
  return config.options.strategy == Strategy::no_shard ||
         std::any_of(config.choices.begin(), config.choices.end(), unsharded);
}

std::string text_of(const Reshard& reshard) {
  if (const int* size = std::get_if<int>(&reshard)) return std::to_string(*size);
  return std::get<bool>(reshard) ? "true" : "false";
}

}  // namespace

RandomConfig random_config(Draw& draw) {
  RandomConfig c;
  c.ranks = draw.one_in(8) ? 6 : 1 + draw.below(4);
  if (c.ranks % 2 == 0 && draw.one_in(2)) c.replicas = draw.one_in(3) ? c.ranks : 2;
  c.dim = draw.of<int64_t>({1, 3, 5, 8});
  c.layers = draw.one_in(3) ? Layers::unfused : Layers::fused;
  c.biased = draw.one_in(2);
  c.extras = draw.one_in(2);
  c.table = draw.one_in(3);
  c.rows = c.table && !draw.one_in(3);
  c.tied = draw.one_in(3);
  c.uses = draw.one_in(4) ? 2 : 1;
  c.recompute = static_cast<Recompute>(draw.below(3));
  c.promised = draw.one_in(2);
  const int sharding = c.ranks / c.replicas;
  Options& o = c.options;
  o.strategy = runtime::kStrategies[static_cast<std::size_t>(draw.below(4))];
  o.combine = Combine::sum;
  o.late_group_elements = draw.of<int64_t>({0, -1});
  o.keep_gathered_bytes = draw.of<int64_t>({0, 700, -1});
  if (draw.one_in(2)) o.prefetch_bytes = draw.of<int64_t>({0, 1 << 20});
  o.row_exchange_bytes = c.rows ? 0 : -1;
  o.keep_gradient_addresses = draw.one_in(3);
  o.delay_wgrad = draw.one_in(4);
  o.fused = !draw.one_in(5);
  if (shards_parameters(o.strategy)) o.reshard_after_forward = random_reshard(draw, sharding);
  if (draw.one_in(2)) c.choices = random_choices(draw, o, sharding);
  if (!any_unsharded(c)) {  // else refused
    o.shard_optimizer_over_replicas = c.replicas > 1 && draw.one_in(2);
    o.offload = draw.one_in(4);
  }
  for (int i = 0; i < 4; ++i) {
    if (draw.one_in(3)) c.frozen.push_back(draw.below(12));
  }
  c.frozen_block = draw.one_in(6);
  return c;
}

std::string describe(const RandomConfig& c) {
  const Options& o = c.options;
  std::ostringstream out;
  out << c.ranks << " ranks, " << c.replicas << " replicas, " << runtime::to_string(o.strategy)
      << ", reshard " << text_of(o.reshard_after_forward) << ", late " << o.late_group_elements << ", keep "
      << o.keep_gathered_bytes << ", prefetch " << o.prefetch_bytes.value_or(-1);
  const std::vector<std::pair<const char*, bool>> flags = {
      {"optimizer over replicas", o.shard_optimizer_over_replicas},
      {"offload", o.offload},
      {"addresses kept", o.keep_gradient_addresses},
      {"delayed", o.delay_wgrad},
      {"not fused", !o.fused},
      {"unfused layers", c.layers == Layers::unfused},
      {"biased", c.biased},
      {"extras", c.extras},
      {"table", c.table},
      {"rows", c.rows},
      {"tied", c.tied},
      {"twice", c.uses > 1},
      {"promised", c.promised},
      {"a frozen block", c.frozen_block}};
  for (const auto& [name, set] : flags) {
    if (set) out << ", " << name;
  }
  out << ", recompute " << nn::to_string(c.recompute) << ", dim " << c.dim << ", frozen";
  for (const int number : c.frozen) out << " " << number;
  for (const UnitChoice& choice : c.choices) {
    out << "; " << (choice.strategy ? runtime::to_string(*choice.strategy) : "as all");
    if (choice.reshard_after_forward) out << ", reshard " << text_of(*choice.reshard_after_forward);
  }
  return out.str();
}

RandomBlock::RandomBlock(const RandomConfig& config, Layers layers, int number) {
  if (config.extras) {
    scalar = register_parameter("scalar", at::ones({}));
    one = register_parameter("one", at::ones({1}));
    none = register_parameter("none", at::zeros({0, 3}));
  }
  const int64_t inner = number == 0 ? config.dim : number == 1 ? 7 : 1;
  const auto seed = 1000 * static_cast<uint64_t>(number + 1);
  up = register_module("up", std::make_shared<SmallLinear>(config.dim, inner, layers, seed, config.biased));
  down = register_module("down",
                         std::make_shared<SmallLinear>(inner, config.dim, layers, seed + 100, config.biased));
}

at::Tensor RandomBlock::forward(const at::Tensor& x) const {
  if (raises) throw std::runtime_error("the block was told to raise");
  at::Tensor inner = at::relu(up->forward(x));
  if (scalar.defined()) inner = inner * scalar;
  at::Tensor result = x + down->forward(inner);
  if (one.defined()) result = result + one + none.sum();
  return result;
}

RandomNet::RandomNet(const RandomConfig& config, bool oracle)
    : oracle_(oracle), config_(config), layers_(oracle ? Layers::oracle : config.layers) {
  if (config.table) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(1);
    table_ = register_module("table", std::make_shared<nn::Embedding>(kWords, config.dim, 1.0, generator));
    const at::NoGradGuard no_grad;
    table_->weight.copy_(integers({kWords, config.dim}, 3));
  } else {
    first_ = register_module(
        "first", std::make_shared<SmallLinear>(config.dim, config.dim, layers_, 7, config.biased));
  }
  for (int i = 0; i < kBlocks; ++i) {
    blocks.push_back(
        register_module("block" + std::to_string(i), std::make_shared<RandomBlock>(config, layers_, i)));
  }
  crossing_ = register_module("crossing", std::make_shared<Crossing>());
  if (!config.tied) {
    last_ = register_module(
        "last", std::make_shared<SmallLinear>(config.dim, config.dim, layers_, 500, config.biased));
  }
  freeze();
}

void RandomNet::freeze() {
  std::vector<at::Tensor> all = parameters();
  for (const int number : config_.frozen) {
    if (number < static_cast<int>(all.size())) all[static_cast<std::size_t>(number)].requires_grad_(false);
  }
  if (!config_.frozen_block) return;
  for (at::Tensor weight : blocks[1]->parameters()) weight.requires_grad_(false);
}

at::Tensor RandomNet::begin(const at::Tensor& input) const {
  if (!config_.table) return first_->forward(input);
  return oracle_ ? at::embedding(table_->weight, input) : table_->look_up(input);
}

at::Tensor RandomNet::head(const at::Tensor& x) const {
  if (!config_.tied) return last_->forward(x);
  if (!config_.table) return SmallLinear::product(layers_, x, first_->weight, {});
  const auto project = [&] { return SmallLinear::product(layers_, x, table_->weight, {}); };
  return oracle_ ? project() : call_as(*table_, project);
}

at::Tensor RandomNet::forward(const at::Tensor& input) {
  at::Tensor x = begin(input);
  for (int i = 0; i < kBlocks; ++i) {
    if (i == skipped) continue;
    const auto block = blocks[static_cast<std::size_t>(i)];
    const auto once = [this, block](const at::Tensor& given) { return through(*block, given); };
    // The reentrant kind has no gradient where its input needs none.
    const bool plain = oracle_ || (config_.recompute == Recompute::reentrant && !x.requires_grad());
    for (int use = 0; use < config_.uses; ++use)
      x = nn::recompute(plain ? Recompute::none : config_.recompute, once, x);
    if (i == 0) side = x;
    if (i == 0) x = oracle_ ? crossing_->forward(x) : fsdpp::call(*crossing_, x);
    if (i == 1 && backward_raises && x.requires_grad())
      x.register_hook([](const at::Tensor&) { throw std::runtime_error("half-way"); });
  }
  return head(x);
}

at::Tensor RandomNet::batch(int rank, int index, int64_t rows) const {
  if (!config_.table) return small_batch(config_.dim, rank, index, rows);
  const uint64_t seed = 77 + 13 * static_cast<uint64_t>(rank) + 1009 * static_cast<uint64_t>(index);
  return at::remainder(integers({rows, 3}, seed, 50), kWords).to(at::kLong);
}

std::vector<runtime::UnitSpec> RandomNet::units() const {
  std::vector<runtime::UnitSpec> specs;
  std::size_t next = 0;
  const auto choice = [&] { return next < config_.choices.size() ? config_.choices[next++] : UnitChoice{}; };
  if (config_.rows)
    specs.push_back({.modules = {table_}, .use = config_.tied ? Use::rows_and_whole : Use::rows});
  for (const auto& block : blocks) specs.push_back({.modules = {block}, .choice = choice()});
  specs.push_back({.modules = {crossing_}, .choice = choice()});
  return specs;
}

}  // namespace fsdpp::test
