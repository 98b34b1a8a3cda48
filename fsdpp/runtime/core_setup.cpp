// Core's beginning and end: the machinery is made and wired together, and what is planned before a step ran.
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"
#include "fsdpp/runtime/core.h"
#include "fsdpp/runtime/registry.h"
#include "fsdpp/runtime/shard_hooks.h"

namespace fsdpp::runtime {
namespace {

constexpr int kChannels = 1 << 24;  // of one Peers in traces

// The forward visits units as registered, the root around all; the backward visits them the other way round,
// the root first (its output is the model's).
std::vector<int> forward_structure(std::size_t units) {
  std::vector<int> order(units);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

std::vector<int> backward_structure(std::size_t units) {
  std::vector<int> order = forward_structure(units);
  if (!order.empty()) std::reverse(order.begin() + 1, order.end());
  return order;
}

template <class Which>
std::vector<std::vector<ParameterGroup*>> groups_by_unit(const std::vector<UnitState>& units, Which which) {
  std::vector<std::vector<ParameterGroup*>> result;
  for (const UnitState& unit : units) {
    result.emplace_back();
    for (const auto& group : unit.groups) {
      if (which(*group)) result.back().push_back(group.get());
    }
  }
  return result;
}

}  // namespace

Core::Core(RankGroups rank_groups, std::shared_ptr<torch::nn::Module> root_module,
           std::vector<UnitState> unit_list, Options given, std::unique_ptr<device::Device> lanes)
    : ranks(rank_groups),
      root(std::move(root_module)),
      units(std::move(unit_list)),
      options(given),
      ledger(std::make_shared<device::Ledger>()),
      device(std::move(lanes)),
      forward_order(structural_visits(forward_structure(units.size()))),
      backward_order(structural_visits(backward_structure(units.size()))),
      evaluation_order(structural_visits(forward_structure(units.size()))) {
  const c10::InferenceMode normal(false);
  for (UnitState& unit : units) {
    for (const auto& unit_group : unit.groups) {
      unit_group->id = static_cast<int>(groups.size());
      groups.push_back(unit_group.get());
      take_over(*unit_group, options.offload, *device, ledger);
    }
  }
  make_peers();
  publisher =
      std::make_unique<Publisher>(*peers, options.shard_optimizer_over_replicas ? replicas.get() : nullptr,
                                  ranks.whole, groups, choose_kept(), options.offload, ledger);
  make_inner_shards();
  for (ParameterGroup* candidate : groups) {
    if (candidate->use == Use::whole) continue;
    row_exchanges.push_back(
        std::make_unique<RowExchange>(*peers, everyone(), *publisher, *candidate, ledger));
    candidate->rows = row_exchanges.back().get();
  }
  make_gradients();
  residency = std::make_unique<Residency>(
      *peers, *publisher,
      groups_by_unit(
          units,
          [](const ParameterGroup& held) { return shards_optimizer(held.strategy) && held.is_gathered(); }),
      unit_sizes(), options.prefetch_bytes, weight_plan(), ledger);
  backward = std::make_shared<BackwardPass>(groups_by_unit(units, [](const ParameterGroup&) { return true; }),
                                            *reducer, *residency, backward_order, *device,
                                            host_gradients.get(), options);
  backward->turns().set_order([&] {
    std::vector<ParameterGroup*> order;
    for (auto unit = units.rbegin(); unit != units.rend(); ++unit) {
      for (const auto& unit_group : unit->groups) {
        if (unit_group->trainable) order.push_back(unit_group.get());
      }
    }
    return order;
  }());
  backward->on_finished([this] {
    settle_window();
    orders_changed_ = backward_order.complete() || orders_changed_;
    for (UnitState& unit : units) unit.passes.complete_backward();
  });
  backward->on_reduced([this] {
    backward_seen_ = true;
    settle_window();
  });
  backward->on_whole([this] { call_shard_hooks(parameters); });
  backward->watch();
  for (ParameterGroup* held : groups) {
    if (!shards_optimizer(held->strategy)) {
      broadcast_from_first(everyone(), *held);
    } else if (replicas && !options.shard_optimizer_over_replicas) {
      broadcast_from_first(*replicas, *held);
    }
  }
}

// Of units whose weights come and go, and not from all ranks each time.
void Core::make_inner_shards() {
  std::map<int, std::vector<ParameterGroup*>> of_size;
  for (const UnitState& unit : units) {
    const int* size = std::get_if<int>(&unit.options.reshard_after_forward);
    if (size == nullptr || *size == 1 || *size == peers->ranks()) continue;
    for (const auto& unit_group : unit.groups) {
      if (unit_group->is_gathered() && unit_group->own_place == nullptr)
        of_size[*size].push_back(unit_group.get());
    }
  }
  std::vector<std::string> names;
  for (const ParameterGroup* held : groups) names.push_back(held->name);
  int first_channel = 4 * kChannels;
  for (const auto& [size, members] : of_size) {
    inner_shards[size] =
        std::make_unique<InnerShards>(ranks.shard, size, *device, names, members, first_channel, ledger);
    first_channel += kChannels;
    for (ParameterGroup* member : members) member->inner = inner_shards[size].get();
  }
}

void Core::make_peers() {
  std::vector<std::string> names;
  for (const ParameterGroup* held : groups) names.push_back(held->name);
  peers = std::make_unique<Peers>(ranks.shard, *device, names);
  if (ranks.experts != nullptr) {
    comm::PeerGroup& among = shards_any() ? ranks.all : *ranks.experts;
    others = std::make_unique<Peers>(among, *device, std::vector<std::string>{}, 3 * kChannels);
  }
  if (ranks.replicate == nullptr) return;
  replicas = std::make_unique<Peers>(*ranks.replicate, *device, names, kChannels);
  whole = std::make_unique<Peers>(ranks.whole, *device, std::vector<std::string>{}, 2 * kChannels);
}

Peers* Core::counted() const {
  if (others) return others.get();
  return shards_any() ? &owners() : nullptr;
}

bool Core::counts_here(const ParameterGroup& held) const {
  return shards_optimizer(held.strategy) || !shards_any() || peers->rank() == 0;
}

bool Core::shards_any() const {
  return std::any_of(groups.begin(), groups.end(),
                     [](const ParameterGroup* held) { return shards_optimizer(held->strategy); });
}

// Slots, and what a backward makes of them.
void Core::make_gradients() {
  std::vector<ParameterGroup*> trainable;
  int64_t largest = 0;  // shard in a reduce
  for (ParameterGroup* candidate : groups) {
    if (!candidate->trainable) continue;
    trainable.push_back(candidate);
    if (candidate->is_gathered()) largest = std::max(largest, candidate->slot_bytes() / peers->ranks());
  }
  peers->prepare_staging(largest, ledger);
  slots = make_slots(trainable, /*windows=*/false);
  window_slots = make_slots(trainable, /*windows=*/true);
  rounded = std::make_unique<RoundedSums>(*peers, trainable, ledger);
  if (replicas) {
    replica_gradients = std::make_unique<ReplicaGradients>(*replicas, trainable,
                                                           options.shard_optimizer_over_replicas, ledger);
  }
  if (options.offload) {
    const bool early = window_slots->slots() == 0 && !replicas;
    host_gradients = std::make_unique<HostGradients>(*device, trainable, early, ledger);
  }
  reducer = make_reducer();
}

// Where gradients begin as a whole: a slot each. Before a backward was seen: units one after another from the
// last to the first, the root's slot open all along; as are those of windows.
std::unique_ptr<SlotMemory> Core::make_slots(const std::vector<ParameterGroup*>& of, bool windows) {
  std::vector<ParameterGroup*> members;
  std::copy_if(of.begin(), of.end(), std::back_inserter(members), [&](const ParameterGroup* candidate) {
    return candidate->is_gathered() && shards_gradients(candidate->strategy) != windows;
  });
  auto made = std::make_unique<SlotMemory>(*peers, members, layout::ArenaPlan::build({}), ledger);
  std::vector<SlotUse> uses;
  for (int slot = made->slots() - 1; slot >= 0; --slot) {
    const bool all_along = windows || made->group(slot).unit == 0;
    uses.push_back({slot, all_along ? 0 : static_cast<int>(uses.size())});
  }
  made->replan(plan_slots(made->sizes(), uses));
  return made;
}

// One for each strategy that there is.
std::unique_ptr<Reducer> Core::make_reducer() {
  const bool mean = options.combine == Combine::mean;
  const double divisor = options.divisor.value_or(mean ? ranks.all.ranks() : 1);
  const auto scale = static_cast<float>(1.0 / divisor);
  ReplicaGradients* hybrid = replica_gradients.get();
  std::map<Strategy, std::shared_ptr<Reducer>> of;
  std::shared_ptr<Reducer> every_backward;
  for (const ParameterGroup* held : groups) {
    if (of.count(held->strategy) > 0) continue;
    if (!shards_gradients(held->strategy)) {
      of[held->strategy] = make_window_reducer(*peers, *window_slots, hybrid, *rounded, scale,
                                               /*whole=*/!shards_optimizer(held->strategy));
      continue;
    }
    if (!every_backward)
      every_backward = make_shard_reducer(*peers, *slots, hybrid, *rounded, scale, options, ledger);
    of[held->strategy] = every_backward;
  }
  return make_strategy_reducer(std::move(of));
}

Core::~Core() {
  if (backward) backward->close();
  for (const UnitState& unit : units) {
    for (const auto& module : unit.modules) unregister_unit(*module);
  }
  for (const auto& parameter : parameters) {
    unregister_sink(parameter->full);
    parameter->full.mutable_grad().reset();
  }
  for (ParameterGroup* held : groups) {
    if (shards_optimizer(held->strategy)) held->detach();
  }
}

// Of weights that come and go.
std::vector<Sized> Core::unit_sizes() const {
  std::vector<Sized> sizes;
  for (const UnitState& unit : units) {
    int64_t bytes = 0;
    for (const auto& unit_group : unit.groups) {
      const bool comes_and_goes = unit_group->is_gathered() && unit_group->own_place == nullptr;
      if (comes_and_goes) bytes += round_up(unit_group->full_bytes(), kAlignment);
    }
    const bool here = !shards_optimizer(unit.options.strategy);
    sizes.push_back({unit.name, shards_parameters(unit.options.strategy) ? bytes : 0, here});
  }
  return sizes;
}

// Groups whose full weights stay. The units that a step keeps longest in any case come first.
std::vector<ParameterGroup*> Core::choose_kept() const {
  std::vector<ParameterGroup*> kept;
  int64_t left = options.keep_gathered_bytes;
  for (const int index : backward_structure(units.size())) {
    const UnitState& unit = units[static_cast<std::size_t>(index)];
    if (!shards_optimizer(unit.options.strategy)) continue;
    const Reshard reshard = unit.options.reshard_after_forward;
    const bool comes_and_goes =
        shards_parameters(unit.options.strategy) && reshard != Reshard(false) && reshard != Reshard(1);
    if (comes_and_goes && options.keep_gathered_bytes >= 0) {
      int64_t bytes = 0;
      for (const auto& unit_group : unit.groups)
        bytes += unit_group->is_gathered() ? unit_group->full_bytes() : 0;
      if (bytes > left) continue;
      left -= bytes;
    }
    for (const auto& unit_group : unit.groups) {
      if (unit_group->is_gathered()) kept.push_back(unit_group.get());
    }
  }
  return kept;
}

layout::ArenaPlan Core::weight_plan() const {
  const std::vector<std::vector<Visit>> orders = {forward_order.expected(), backward_order.expected(),
                                                  evaluation_order.expected()};
  return plan_weights(unit_sizes(), orders, options.prefetch_bytes);
}

}  // namespace fsdpp::runtime
