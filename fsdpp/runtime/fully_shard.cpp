#include "fsdpp/runtime/fully_shard.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/device/host.h"
#include "fsdpp/runtime/core.h"
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
                                  const std::vector<runtime::UnitSpec>& specs, Walk& walk) {
  std::unordered_map<const Module*, std::string> paths;
  for (const auto& item : root->named_modules()) paths[item.value().get()] = item.key();
  std::vector<UnitState> units(1);
  units[0].name = "root";
  units[0].modules = {root};
  walk.unit_of[root.get()] = 0;
  for (const runtime::UnitSpec& spec : specs) {
    require(!spec.modules.empty(), "fully_shard: unit ", units.size(),
            " has no module; give each unit at least one");
    UnitState unit;
    unit.use = spec.use;
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

void check_overlaps(const std::vector<Found>& found) {
  std::map<const void*, const Found*> by_storage;
  for (const Found& item : found) {
    if (item.tensor.numel() == 0) continue;
    const auto [entry, fresh] = by_storage.try_emplace(item.tensor.storage().data(), &item);
    require(fresh, "fully_shard: parameters ", entry->second->name, " and ", item.name,
            " are views of the same memory; make them one parameter, or clone one of them");
  }
}

std::string group_name(const UnitState& unit, at::ScalarType dtype, bool trainable, std::size_t kinds) {
  if (kinds == 1) return unit.name;
  return text(unit.name, " (", c10::scalarTypeToTypeMeta(dtype).name(), trainable ? ")" : ", frozen)");
}

// What the model's weights become.
struct Target {
  at::Device place;
  std::optional<at::ScalarType> dtype;  // nothing: each parameter keeps its own
  int64_t row_exchange_bytes;           // negative: no group is exchanged by rows
  at::ScalarType wire;                  // of gradient slots
  int ranks;                            // that shard
  int rank;                             // this one's number among them
  int replicas;                         // of each shard
  int replica;                          // this rank's number among them
  bool main_over_replicas;              // main weights are sharded over them too
};

void check_mesh(const runtime::Options& options, const runtime::RankGroups& ranks) {
  if (!options.shard_optimizer_over_replicas) return;
  require(ranks.replicate != nullptr,
          "shard_optimizer_over_replicas on a mesh without the axis \"replicate\": "
          "there are no replicas (an axis of size 1 has none); leave the option out, or give a hybrid mesh");
  require(runtime::shards_optimizer(options.strategy), "shard_optimizer_over_replicas with strategy ",
          runtime::to_string(options.strategy),
          ", which shards no optimizer state; use optim, optim_grads or optim_grads_params");
}

void check_wire(const runtime::Options& options, comm::PeerGroup& group) {
  const at::ScalarType wire = options.wire_dtype;
  require(wire == at::kFloat || wire == at::kBFloat16, "wire_dtype is ", c10::toString(wire),
          "; expected Float or BFloat16");
  if (wire == at::kFloat) return;
  require(runtime::shards_gradients(options.strategy), "wire_dtype BFloat16 with strategy ",
          runtime::to_string(options.strategy),
          ": its gradients stay where they are accumulated, in fp32; use Float, or optim_grads or "
          "optim_grads_params");
  require(group.lanes().collectives() == nullptr, "wire_dtype BFloat16 over ", group.lanes().describe(),
          ": these add in bf16 on the way; use Float where GPUs do not address each other's memory");
}

Use use_of(const UnitState& unit, const ParameterGroup& group, const Target& target) {
  if (unit.use == Use::whole) return Use::whole;
  require(group.parameters.size() == 1 && group.parameters.front()->sizes.size() == 2, "fully_shard: unit ",
          unit.name, " is to be exchanged by rows, but it has ", group.parameters.size(),
          " parameters of one kind; expected one embedding table [rows, dim]");
  const bool large = target.row_exchange_bytes >= 0 && group.full_bytes() >= target.row_exchange_bytes;
  return large && group.trainable ? unit.use : Use::whole;
}

void lay_out(ParameterGroup& group, const std::vector<layout::Shape>& shapes, const Target& target) {
  const auto bytes = static_cast<int64_t>(c10::elementSize(group.dtype));
  group.layout = std::make_shared<const layout::ShardLayout>(
      layout::ShardLayout::flat(shapes, bytes, target.ranks, target.replicas));
  group.main_layout = group.layout;
  group.main_part = target.rank;
  if (!target.main_over_replicas) return;
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
    const Kind kind{target.dtype.value_or(found[i].tensor.scalar_type()), found[i].tensor.requires_grad()};
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
    group->place = target.place;
    group->wire = target.wire;
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
    lay_out(*group, shapes, target);
    if (group->layout->full_numel() == 0) {  // nothing to shard: these stay what they are
      for (const std::size_t i : members) parameters[i] = nullptr;
      continue;
    }
    group->use = use_of(unit, *group, target);
    unit.groups.push_back(std::move(group));
  }
}

Target target_of(const runtime::Options& options, const runtime::RankGroups& ranks,
                 const device::Device& device) {
  const bool on_host = device.gpu() < 0;
  const bool rows = runtime::shards_gradients(options.strategy) && options.fused &&
                    ranks.shard.lanes().collectives() == nullptr &&
                    ranks.shard.ranks() <= device::kMaxRowRanks;
  return {.place = on_host ? at::Device(at::kCPU)
                           : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device.gpu())),
          .dtype = options.model_dtype,
          .row_exchange_bytes = rows ? options.row_exchange_bytes : -1,
          .wire = options.wire_dtype,
          .ranks = ranks.shard.ranks(),
          .rank = ranks.shard.rank(),
          .replicas = ranks.replicate == nullptr ? 1 : ranks.replicate->ranks(),
          .replica = ranks.replicate == nullptr ? 0 : ranks.replicate->rank(),
          .main_over_replicas = options.shard_optimizer_over_replicas};
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
  std::vector<UnitState> units = make_units(root, specs, walk);
  walk.visit(*root, "", 0);
  if (device == nullptr) device = std::make_unique<device::HostDevice>();
  check_mesh(options, ranks);
  require(!options.offload || runtime::shards_optimizer(options.strategy), "offload with strategy ",
          runtime::to_string(options.strategy),
          ": every rank would update the whole model in host memory; use optim, optim_grads or "
          "optim_grads_params");
  require(!options.prefetch_bytes || *options.prefetch_bytes >= 0,
          "fully_shard: prefetch_bytes = ", options.prefetch_bytes.value_or(0),
          "; expected 0 or more, or nothing");
  require(!options.divisor || *options.divisor > 0, "fully_shard: divisor = ", options.divisor.value_or(1),
          "; expected a number above 0");
  check_wire(options, ranks.shard);
  const Target target = target_of(options, ranks, *device);
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
