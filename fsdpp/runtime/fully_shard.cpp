#include "fsdpp/runtime/fully_shard.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/device/host.h"
#include "fsdpp/runtime/check_data.h"
#include "fsdpp/runtime/check_options.h"
#include "fsdpp/runtime/core.h"
#include "fsdpp/runtime/peers.h"
#include "fsdpp/runtime/registry.h"

namespace fsdpp {
namespace {

using runtime::Parameter;
using runtime::ParameterGroup;
using runtime::UnitState;
using runtime::Use;
using torch::nn::Module;

// A parameter as found in the module tree.
struct Found {
  std::string name;
  at::Tensor tensor;
  int unit;
};

struct Walk {
  std::unordered_map<const Module*, int> unit_of;
  std::unordered_map<const c10::TensorImpl*, std::size_t> index;
  std::vector<Found> found;  // in registration order, tied parameters once

  void visit(const Module& module, const std::string& path, int unit) {
    if (runtime::find_unit(module).unit >= 0) return;  // another sharded model's: experts on their own mesh
    if (const auto own = unit_of.find(&module); own != unit_of.end()) unit = own->second;
    const std::string prefix = path.empty() ? "" : path + ".";
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (!item.value().defined()) continue;
      const auto [entry, fresh] = index.try_emplace(item.value().unsafeGetTensorImpl(), found.size());
      if (fresh) {
        found.push_back({prefix + item.key(), item.value(), unit});
      } else if (found[entry->second].unit != unit) {
        found[entry->second].unit = 0;  // shared between units: the root holds it all along
      }
    }
    for (const auto& child : module.named_children()) visit(*child.value(), prefix + child.key(), unit);
  }
};

std::vector<UnitState> make_units(const std::shared_ptr<Module>& root,
                                  const std::vector<runtime::UnitSpec>& specs,
                                  const runtime::Options& options, Walk& walk) {
  std::unordered_map<const Module*, std::string> paths;
  for (const auto& item : root->named_modules()) paths[item.value().get()] = item.key();
  std::vector<UnitState> units(1);
  units[0].name = "root";
  units[0].modules = {root};
  units[0].options = options;
  walk.unit_of[root.get()] = 0;
  for (const runtime::UnitSpec& spec : specs) {
    require(!spec.modules.empty(), "fully_shard: unit ", units.size(),
            " has no module; give each unit at least one");
    UnitState unit;
    unit.use = spec.use;
    unit.options = runtime::with(options, spec.choice);
    for (const auto& module : spec.modules) {
      require(module != nullptr, "fully_shard: a module of unit ", units.size(), " is null");
      const auto path = paths.find(module.get());
      require(path != paths.end(), "fully_shard: a module of type ", module->name(),
              " is given as a unit but is not "
              "part of the root; register it below the root first");
      const bool fresh = walk.unit_of.emplace(module.get(), static_cast<int>(units.size())).second;
      require(fresh, "fully_shard: module ", path->second.empty() ? "root" : path->second,
              " is given as a unit twice; the root is a unit by itself");
      require(runtime::find_unit(*module).unit < 0, "fully_shard: module ", path->second,
              " is already a unit of a sharded model");
      unit.name += (unit.name.empty() ? "" : "+") + path->second;
      unit.modules.push_back(module);
    }
    units.push_back(std::move(unit));
  }
  return units;
}

void check_parameter(const Found& found, at::Device place) {
  const at::Tensor& tensor = found.tensor;
  require(tensor.device().is_cpu() || tensor.device() == place, "fully_shard: parameter ", found.name,
          " is on ", tensor.device().str(), "; expected the CPU", place.is_cpu() ? "" : " or the lanes' ",
          place.is_cpu() ? "" : place.str());
  const auto dtype = tensor.scalar_type();
  require(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, "fully_shard: parameter ",
          found.name, " has dtype ", tensor.dtype().name(),
          "; expected float, bfloat16 or half: convert the module with to() first");
  require(tensor.is_leaf(), "fully_shard: parameter ", found.name, " is not a leaf tensor; register a leaf");
  require(runtime::sink_of(tensor) == nullptr, "fully_shard: parameter ", found.name,
          " belongs to a sharded model (or to OwnGradients) already; shard each module once");
}

const void* memory_of(const Found& item) {
  try {
    return item.tensor.storage().data();
  } catch (const c10::Error&) {  // a guard's
    throw UsageError(text("fully_shard: parameter ", item.name,
                          " has no memory: the sharded model that it was part of is gone, and with it the "
                          "weights; shard a new module"));
  }
}

void check_overlaps(const std::vector<Found>& found) {
  std::map<const void*, const Found*> by_storage;
  for (const Found& item : found) {
    if (item.tensor.numel() == 0) continue;
    const auto [entry, fresh] = by_storage.try_emplace(memory_of(item), &item);
    require(fresh, "fully_shard: parameters ", entry->second->name, " and ", item.name,
            " are views of the same memory; make them one parameter, or clone one of them (were they part of "
            "a sharded model that is gone, shard a new module)");
  }
}

std::string group_name(const UnitState& unit, at::ScalarType dtype, bool trainable, std::size_t kinds) {
  if (kinds == 1) return unit.name;
  return text(unit.name, " (", c10::scalarTypeToTypeMeta(dtype).name(), trainable ? ")" : ", frozen)");
}

// What a unit's weights become.
struct Target {
  at::Device place;
  bool rows;     // groups may be exchanged by rows
  int ranks;     // that shard
  int rank;      // this one's number among them
  int replicas;  // of each shard
  int replica;   // this rank's number among them
};

Use use_of(const UnitState& unit, const ParameterGroup& group, const Target& target) {
  if (unit.use == Use::whole) return Use::whole;
  require(group.parameters.size() == 1 && group.parameters.front()->sizes.size() == 2, "fully_shard: unit ",
          unit.name, " is to be exchanged by rows, but it has ", group.parameters.size(),
          " parameters of one kind; expected one embedding table [rows, dim]");
  const runtime::Options& options = unit.options;
  const bool can = target.rows && options.fused && runtime::shards_gradients(options.strategy) &&
                   group.trainable && !group.rounds_sums();
  const bool large = options.row_exchange_bytes >= 0 && group.full_bytes() >= options.row_exchange_bytes;
  return can && large ? unit.use : Use::whole;
}

// The dtypes of main weights, gradients and slots. Frozen weights whose dtype does not change (`as_given`)
// are all there is to know: no update will be lost in their roundings.
void choose_dtypes(ParameterGroup& group, const runtime::Options& options, bool as_given) {
  const bool never_rounded = !group.trainable && as_given;
  if (never_rounded || options.main_weights == runtime::MainWeights::model_dtype)
    group.main_dtype = group.dtype;
  group.gradient_dtype = options.accumulation_dtype;
  const bool window_in_slot = !runtime::shards_gradients(options.strategy);
  group.wire = window_in_slot ? options.accumulation_dtype : options.wire_dtype;
}

void lay_out(ParameterGroup& group, const std::vector<layout::Shape>& shapes, const Target& target,
             bool main_over_replicas) {
  const auto bytes = static_cast<int64_t>(c10::elementSize(group.dtype));
  group.layout = std::make_shared<const layout::ShardLayout>(
      layout::ShardLayout::flat(shapes, bytes, target.ranks, target.replicas));
  group.main_layout = group.layout;
  group.main_part = target.rank;
  if (!main_over_replicas) return;
  group.main_layout = std::make_shared<const layout::ShardLayout>(
      layout::ShardLayout::flat(shapes, bytes, target.ranks * target.replicas));
  group.main_part = target.rank * target.replicas + target.replica;
  group.main_offset = target.replica * group.main_numel();
}

// Groups the parameters of one unit by dtype and requires_grad, in order of their first parameter.
void make_groups(UnitState& unit, int index, const std::vector<Found>& found, const Target& target,
                 std::vector<std::shared_ptr<Parameter>>& parameters) {
  using Kind = std::pair<at::ScalarType, bool>;
  std::vector<std::pair<Kind, std::vector<std::size_t>>> kinds;
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i].unit != index) continue;
    const Kind kind{unit.options.model_dtype.value_or(found[i].tensor.scalar_type()),
                    found[i].tensor.requires_grad()};
    auto entry =
        std::find_if(kinds.begin(), kinds.end(), [&](const auto& known) { return known.first == kind; });
    if (entry == kinds.end()) entry = kinds.insert(kinds.end(), {kind, {}});
    entry->second.push_back(i);
  }
  for (const auto& [kind, members] : kinds) {
    auto group = std::make_unique<ParameterGroup>();
    group->unit = index;
    group->name = group_name(unit, kind.first, kind.second, kinds.size());
    group->dtype = kind.first;
    group->trainable = kind.second;
    group->strategy = unit.options.strategy;
    group->place = target.place;
    const bool as_given = std::all_of(members.begin(), members.end(), [&](std::size_t i) {
      return found[i].tensor.scalar_type() == group->dtype;
    });
    choose_dtypes(*group, unit.options, as_given);
    std::vector<layout::Shape> shapes;
    for (const std::size_t i : members) {
      auto parameter = std::make_shared<Parameter>();
      parameter->name = found[i].name;
      parameter->full = found[i].tensor;
      parameter->sizes = found[i].tensor.sizes().vec();
      parameter->index = static_cast<int>(shapes.size());
      parameter->group = group.get();
      shapes.push_back({parameter->name, parameter->sizes});
      parameters[i] = parameter;
      group->parameters.push_back(std::move(parameter));
    }
    lay_out(*group, shapes, target, unit.options.shard_optimizer_over_replicas);
    if (group->layout->full_numel() == 0) {  // nothing to shard: these stay what they are
      for (const std::size_t i : members) parameters[i] = nullptr;
      continue;
    }
    group->use = use_of(unit, *group, target);
    unit.groups.push_back(std::move(group));
  }
}

Target target_of(const runtime::RankGroups& ranks, const device::Device& device) {
  const bool on_host = device.gpu() < 0;
  return {.place = on_host ? at::Device(at::kCPU)
                           : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device.gpu())),
          .rows = ranks.shard.lanes().collectives() == nullptr && ranks.shard.ranks() <= device::kMaxRowRanks,
          .ranks = ranks.shard.ranks(),
          .rank = ranks.shard.rank(),
          .replicas = ranks.replicate == nullptr ? 1 : ranks.replicate->ranks(),
          .replica = ranks.replicate == nullptr ? 0 : ranks.replicate->rank()};
}

std::shared_ptr<runtime::ShardedModel> shard_over(const runtime::RankGroups& ranks,
                                                  const std::shared_ptr<Module>& root,
                                                  const std::vector<runtime::UnitSpec>& specs,
                                                  const runtime::Options& options,
                                                  std::unique_ptr<device::Device> device) {
  require(root != nullptr, "fully_shard: the root module is null");
  require(runtime::find_unit(*root).unit < 0,
          "fully_shard: the root module is already a unit of a sharded model");
  Walk walk;
  std::vector<UnitState> units = make_units(root, specs, options, walk);
  walk.visit(*root, "", 0);
  if (device == nullptr) device = std::make_unique<device::HostDevice>();
  // All that can be wrong is found before the model's weights move.
  runtime::check_lanes(ranks.shard, *device);
  if (ranks.replicate != nullptr) runtime::check_lanes(*ranks.replicate, *device);
  if (ranks.experts != nullptr) runtime::check_lanes(*ranks.experts, *device);
  for (const UnitState& unit : units) check_options(unit.options, ranks, unit.name);
  const Target target = target_of(ranks, *device);
  runtime::check_data(*root);
  for (const Found& found : walk.found) check_parameter(found, target.place);
  check_overlaps(walk.found);
  std::vector<std::shared_ptr<Parameter>> parameters(walk.found.size());
  for (std::size_t i = 0; i < units.size(); ++i) {
    make_groups(units[i], static_cast<int>(i), walk.found, target, parameters);
  }
  std::erase(parameters, nullptr);
  walk.found.clear();
  auto core = std::make_shared<runtime::Core>(ranks, root, std::move(units), options, std::move(device));
  core->parameters = std::move(parameters);
  auto model = std::make_shared<runtime::ShardedModel>(core);
  for (const auto& parameter : core->parameters) runtime::register_sink(parameter->full, parameter);
  for (std::size_t i = 0; i < core->units.size(); ++i) {
    for (const auto& module : core->units[i].modules)
      runtime::register_unit(*module, model, static_cast<int>(i));
  }
  return model;
}

}  // namespace

std::shared_ptr<runtime::ShardedModel> fully_shard(comm::PeerGroup& group,
                                                   const std::shared_ptr<Module>& root,
                                                   const std::vector<runtime::UnitSpec>& units,
                                                   runtime::Options options,
                                                   std::unique_ptr<device::Device> device) {
  return shard_over(runtime::RankGroups(group), root, units, options, std::move(device));
}

std::shared_ptr<runtime::ShardedModel> fully_shard(comm::MeshGroup& mesh, const std::shared_ptr<Module>& root,
                                                   const std::vector<runtime::UnitSpec>& units,
                                                   runtime::Options options,
                                                   std::unique_ptr<device::Device> device) {
  return shard_over(runtime::RankGroups(mesh), root, units, options, std::move(device));
}

}  // namespace fsdpp
