#include "fsdpp/runtime/sharded_model.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"
#include "fsdpp/runtime/core.h"
#include "fsdpp/runtime/registry.h"

namespace fsdpp::runtime {
namespace {

using device::LaneKind;

// Whole tensors cut out of a group's full buffer.
void cut(const ParameterGroup& group, const at::Tensor& flat, std::vector<at::Tensor>& whole,
         const std::vector<std::shared_ptr<Parameter>>& parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = *parameters[i];
    if (parameter.group != &group) continue;
    const int64_t offset = group.layout->parameter_offset(parameter.index);
    whole[i] =
        flat.narrow(0, offset, group.layout->parameter_numel(parameter.index)).view(parameter.sizes).clone();
  }
}

void announce_read(device::Device& device, const ParameterGroup& group) {
  device::Access access;
  for (const auto& parameter : group.parameters) {
    const at::Tensor& gradient = parameter->shard.grad();
    if (gradient.defined()) access.reads.push_back({gradient.const_data_ptr(), gradient.nbytes()});
  }
  device.announce(LaneKind::host, "gradients of " + group.name, std::move(access));
}

// This rank's gradients of `group` at their places in a shard, and behind it, per parameter, whether it has
// one here.
void fill_gradient_shard(const ParameterGroup& group, float* shard) {
  const bool whole = !shards_optimizer(group.strategy);
  float* defined = shard + group.main_numel();
  for (const auto& parameter : group.parameters) *defined++ = parameter->shard.grad().defined() ? 1 : 0;
  for (const layout::Segment& segment : group.main_layout->segments(group.main_part)) {
    const at::Tensor gradient = group.parameters[static_cast<std::size_t>(segment.parameter)]->shard.grad();
    if (!gradient.defined()) continue;
    copy_elements(gradient, whole ? segment.parameter_offset : 0, segment.count,
                  {reinterpret_cast<std::byte*>(shard + segment.shard_offset), at::kFloat});
  }
}

}  // namespace

MicrobatchScope::MicrobatchScope(std::shared_ptr<Core> core, bool last)
    : core_(std::move(core)), last_around_(core_->backward->next_is_last()), around_(core_->in_scope) {
  core_->backward->set_last(last);
  core_->in_scope = true;
}

MicrobatchScope::~MicrobatchScope() {
  core_->backward->set_last(last_around_);
  core_->in_scope = around_;
}

ShardedModel::ShardedModel(std::shared_ptr<Core> core) : core_(std::move(core)) {}
ShardedModel::~ShardedModel() = default;

std::vector<at::Tensor> ShardedModel::shards() const {
  std::vector<at::Tensor> result;
  for (const auto& parameter : core_->parameters) result.push_back(parameter->shard);
  return result;
}

std::vector<std::pair<std::string, std::vector<int64_t>>> ShardedModel::parameters() const {
  std::vector<std::pair<std::string, std::vector<int64_t>>> result;
  for (const auto& parameter : core_->parameters) result.emplace_back(parameter->name, parameter->sizes);
  return result;
}

void ShardedModel::zero_grad(bool set_to_none) { core_->zero_grad(set_to_none); }
void ShardedModel::require_complete_gradients(const char* what) const {
  const int waiting = core_->backward->waiting();
  require(waiting < 0, what, ": gradients of unit ",
          waiting < 0 ? "" : core_->units[static_cast<std::size_t>(waiting)].name,
          " wait to be reduced; call ", core_->backward->by_hand() ? "finish_reduces()" : "backward_dw()",
          " first");
  const Parameter* partial = core_->reducer->partial();
  require(partial == nullptr, what, ": the gradient of ", partial == nullptr ? "" : partial->name,
          " is this rank's part of a sum that is not complete, since the window's last backward has not run: "
          "declare "
          "it with microbatch(true), or run it outside of a microbatch() scope; or clear gradients with "
          "zero_grad()");
}

int ShardedModel::unit_of(const torch::nn::Module& module, const char* what) const {
  const UnitRef found = find_unit(module);
  require(found.model.get() == this, what, ": module ", module.name(),
          " is no unit of this model; give a module that was named as a unit to fully_shard(), or its root");
  return found.unit;
}

void ShardedModel::backward_dw() { core_->backward->backward_dw(); }
void ShardedModel::backward_dw(const torch::nn::Module& unit) {
  core_->backward->backward_dw(unit_of(unit, "backward_dw"));
}
void ShardedModel::gather(const torch::nn::Module& unit) {
  const int index = unit_of(unit, "gather");
  core_->refresh();
  core_->residency->hold(index, Hold::user);
}
void ShardedModel::release(const torch::nn::Module& unit) {
  core_->residency->drop_all(unit_of(unit, "release"), Hold::user);
}
void ShardedModel::reduce_by_hand(bool by_hand) { core_->backward->set_by_hand(by_hand); }
void ShardedModel::reduce(const torch::nn::Module& unit) { core_->backward->reduce(unit_of(unit, "reduce")); }
void ShardedModel::finish_reduces() { core_->backward->finish_reduces(); }

void ShardedModel::weights_changed() { core_->weights_changed(); }
void ShardedModel::promise_to_tell() { core_->promised = true; }
MicrobatchScope ShardedModel::microbatch(bool last) const { return {core_, last}; }
void ShardedModel::hold_all() { core_->hold_all(true); }
void ShardedModel::release_all() { core_->hold_all(false); }
const device::Ledger& ShardedModel::memory() const { return *core_->ledger; }
const Options& ShardedModel::options() const { return core_->options; }
comm::PeerGroup& ShardedModel::group() const { return core_->ranks.whole; }
comm::PeerGroup& ShardedModel::owners() const { return core_->owners().group(); }
comm::PeerGroup* ShardedModel::counted() const {
  Peers* counted = core_->counted();
  return counted == nullptr ? nullptr : &counted->group();
}
device::Device& ShardedModel::device() const { return *core_->device; }
bool ShardedModel::at_rest() const { return core_->residency->at_rest(); }
std::shared_ptr<Pass> ShardedModel::enter(int unit) { return core_->enter(unit); }
void ShardedModel::leave(const std::shared_ptr<Pass>& pass, at::Tensor& output) {
  core_->leave(pass, output);
}
void ShardedModel::finish(const std::shared_ptr<Pass>& pass, bool raised) { core_->finish(pass, raised); }

const std::shared_ptr<device::Ledger>& ShardedModel::ledger() const { return core_->ledger; }
void ShardedModel::update_and_publish(const std::function<void()>& update) { core_->publish_by(update); }
void ShardedModel::exchange_scalars(const double* own, double* all) {
  core_->counted()->exchange_scalars(own, all);
}

std::vector<ShardedModel::ShardRun> ShardedModel::shard_runs() const {
  std::vector<ShardRun> runs;
  for (const auto& parameter : core_->parameters) {
    const ParameterGroup& group = *parameter->group;
    auto* main =
        parameter->shard.numel() == 0 ? nullptr : static_cast<std::byte*>(parameter->shard.data_ptr());
    const int64_t in_main = main == nullptr ? 0 : (main - group.main->data()) / group.main_bytes(1);
    const int64_t offset = in_main + (group.published ? group.main_offset : 0);
    std::byte* model = group.published ? group.published->local() : group.weights->data();
    if (model == group.main->data()) model = nullptr;
    auto* fp32 = group.main_dtype == at::kFloat ? reinterpret_cast<float*>(main) : nullptr;
    runs.push_back({parameter->shard, fp32,
                    model == nullptr ? nullptr : model + offset * group.element_bytes(), group.dtype,
                    parameter->shard.numel(), core_->counts_here(group)});
  }
  return runs;
}

bool ShardedModel::all_fp32() const {
  return std::all_of(core_->groups.begin(), core_->groups.end(), [](const ParameterGroup* group) {
    return !group->trainable || (group->main_dtype == at::kFloat && group->gradient_dtype == at::kFloat);
  });
}

std::vector<at::Tensor> ShardedModel::counted_gradients() const {
  std::vector<at::Tensor> result;
  for (const auto& parameter : core_->parameters) {
    const at::Tensor& gradient = parameter->shard.grad();
    if (gradient.defined() && gradient.numel() > 0 && core_->counts_here(*parameter->group))
      result.push_back(gradient);
  }
  return result;
}

std::vector<UnitReport> ShardedModel::units() const {
  std::vector<UnitReport> reports;
  for (const UnitState& unit : core_->units) {
    UnitReport report{.name = unit.name};
    for (const auto& group : unit.groups) {
      report.parameters += group->layout->full_numel() - group->layout->padding_numel();
      report.bytes += group->full_bytes();
      report.padding_bytes += group->layout->padding_numel() * group->element_bytes();
    }
    reports.push_back(report);
  }
  return reports;
}

Counters ShardedModel::counters() const {
  return {.gathers = core_->residency->gathers(),
          .publications = core_->publisher->epoch(),
          .departures = core_->forward_order.departures() + core_->backward_order.departures() +
                        core_->evaluation_order.departures(),
          .on_demand_gathers = core_->backward->on_demand_gathers(),
          .weight_overflows = core_->residency->arena().overflows(),
          .spills = core_->reducer->spills()};
}

std::string ShardedModel::memory_plan() const {
  const layout::ArenaPlan& weights = core_->residency->arena().plan();
  const layout::ArenaPlan& slots = core_->slots->plan();
  const layout::ArenaPlan& windows = core_->window_slots->plan();
  return text("full weights: arena of ", human_bytes(weights.bytes()), " for ", weights.buffers().size(),
              " units (no plan needs less than ", human_bytes(weights.lower_bound_bytes()),
              "); gradient slots: ", human_bytes(slots.bytes() + windows.bytes()), " for ",
              slots.buffers().size() + windows.buffers().size(),
              " groups; published weights: ", human_bytes(core_->publisher->bytes()),
              "; full weights that stay: ", human_bytes(core_->publisher->kept_bytes()), "; lanes through ",
              core_->ranks.shard.lanes().describe());
}

std::vector<at::Tensor> ShardedModel::full_weights() {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  core_->refresh();
  std::vector<at::Tensor> whole(core_->parameters.size());
  for (const ParameterGroup* group : core_->groups) {
    at::Tensor flat =
        at::empty({group->layout->full_numel()}, at::TensorOptions(group->place).dtype(group->dtype));
    auto* bytes = static_cast<std::byte*>(flat.data_ptr());
    device::Device& device = *core_->device;
    device.wait(device::LaneKind::gather,
                device.record(device::LaneKind::compute));  // `flat` may be re-used memory
    if (group->published) {
      core_->publisher->gather(*group, bytes);
    } else {
      device.copy(device::LaneKind::gather, "read " + group->name, bytes, group->weights->data(),
                  static_cast<std::size_t>(group->full_bytes()));
    }
    device.wait(device::LaneKind::compute, device.record(device::LaneKind::gather));
    const ByteRange range{bytes, flat.nbytes()};
    device.announce(LaneKind::compute, "read " + group->name, {{range}, {}});
    cut(*group, flat, whole, core_->parameters);
    device.free(LaneKind::compute, "read " + group->name, range);
  }
  return whole;
}

std::vector<at::Tensor> ShardedModel::full_gradients() {
  require_complete_gradients("full_gradients");
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> whole(core_->parameters.size());
  comm::PeerGroup& owners = core_->owners().group();
  core_->device->wait(LaneKind::host, core_->device->record(LaneKind::compute));
  for (const ParameterGroup* group : core_->groups) {
    if (!group->trainable) continue;
    const int64_t count = group->main_numel();
    const std::size_t parameters = group->parameters.size();
    const auto memory =
        owners.allocate((static_cast<std::size_t>(count) + parameters) * sizeof(float), "gradients to read");
    announce_read(*core_->device, *group);
    fill_gradient_shard(*group, reinterpret_cast<float*>(memory->peer(owners.rank())));
    owners.barrier();
    at::Tensor flat = at::empty({group->layout->full_numel()}, at::kFloat);  // on the host
    std::vector<bool> defined(parameters, true);                             // on every rank
    for (int r = 0; r < owners.ranks(); ++r) {
      const auto* shard = reinterpret_cast<const float*>(memory->peer(r));
      std::memcpy(flat.data_ptr<float>() + core_->part_of_owner(r) * count, shard,
                  static_cast<std::size_t>(count) * sizeof(float));
      for (std::size_t i = 0; i < parameters; ++i)
        defined[i] = defined[i] && shard[count + static_cast<int64_t>(i)] != 0;
    }
    owners.barrier();
    cut(*group, flat.to(group->place), whole, core_->parameters);
    for (std::size_t i = 0; i < whole.size(); ++i) {
      const Parameter& parameter = *core_->parameters[i];
      if (parameter.group == group && !defined[static_cast<std::size_t>(parameter.index)]) whole[i].reset();
    }
  }
  return whole;
}

void ShardedModel::load_weights(const std::vector<at::Tensor>& weights) {
  const at::NoGradGuard no_grad;
  require(weights.size() == core_->parameters.size(), "load_weights: ", weights.size(), " tensors given for ",
          core_->parameters.size(), " parameters; give one per entry of parameters()");
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const Parameter& parameter = *core_->parameters[i];
    require(weights[i].sizes() == at::IntArrayRef(parameter.sizes), "load_weights: parameter ",
            parameter.name, " has sizes ", at::IntArrayRef(parameter.sizes), " but the tensor given has ",
            weights[i].sizes());
  }
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const Parameter& parameter = *core_->parameters[i];
    const ParameterGroup& group = *parameter.group;
    if (!shards_optimizer(group.strategy)) {
      parameter.shard.detach().copy_(weights[i]);
      continue;
    }
    for (const layout::Segment& segment : group.main_layout->segments(group.main_part)) {
      if (segment.parameter != parameter.index) continue;
      copy_elements(
          weights[i], segment.parameter_offset, segment.count,
          {group.main->data() + group.main_bytes(segment.shard_offset), group.main_dtype, group.main_place});
    }
  }
  core_->weights_changed();
}

}  // namespace fsdpp::runtime
