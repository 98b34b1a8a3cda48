#include "fsdpp/runtime/host_gradients.h"

#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/empty.h>

#include <utility>

namespace fsdpp::runtime {

using device::LaneKind;

HostGradients::HostGradients(device::Device& device, const std::vector<ParameterGroup*>& groups, bool early,
                             std::shared_ptr<device::Ledger> ledger)
    : device_(device), early_(early) {
  for (ParameterGroup* group : groups) {
    groups_[group].memory = device.allocate_on_host(group->main->bytes(), "gradients in host memory", ledger);
  }
}

// Where its gradient comes to: as its main weights lie among the group's.
at::Tensor HostGradients::place_of(const Parameter& parameter) const {
  const ParameterGroup& group = *parameter.group;
  const Host& host = groups_.at(parameter.group);
  if (parameter.shard.numel() == 0) return at::empty({0}, at::TensorOptions().dtype(at::kFloat));
  const auto* main = reinterpret_cast<const std::byte*>(parameter.shard.const_data_ptr());
  std::byte* place = host.memory.data() + (main - group.main->data());
  return tensor_over(group.main, place, parameter.shard.sizes(), at::TensorOptions().dtype(at::kFloat));
}

void HostGradients::begin() {
  const at::NoGradGuard no_grad;
  for (auto& [group, host] : groups_) {
    host.copied = false;
    for (const auto& parameter : group->parameters) make_room(*parameter);
  }
}

// What any zero_grad cleared since the last round is seen by what is there now: nothing, or zeros where
// something else was.
void HostGradients::make_room(const Parameter& parameter) {
  at::Tensor& gradient = parameter.shard.mutable_grad();
  const auto found = on_the_lanes_.find(&parameter);
  if (!gradient.defined()) {
    kept_.erase(&parameter);
  } else if (found == on_the_lanes_.end() || found->second.data != gradient.const_data_ptr()) {
    kept_[&parameter] = gradient.clone();  // its place is about to be written
    gradient.reset();
  } else if (kept_.count(&parameter) > 0 && gradient._version() != found->second.version &&
             gradient.count_nonzero().item<int64_t>() == 0) {
    kept_.erase(&parameter);
  }
}

void HostGradients::follow(ParameterGroup& group) {
  if (early_ && last_ != nullptr) copy(*last_);
  last_ = &group;
}

// One operation, with neighbours in one piece.
void HostGradients::copy(ParameterGroup& group) {
  Host& host = groups_.at(&group);
  if (std::exchange(host.copied, true)) return;
  std::vector<device::Copy> copies;
  for (const auto& parameter : group.parameters) {
    const at::Tensor& gradient = parameter->shard.grad();
    if (!gradient.defined() || gradient.numel() == 0) continue;
    const auto* from = static_cast<const std::byte*>(gradient.const_data_ptr());
    auto* to = static_cast<std::byte*>(place_of(*parameter).data_ptr());
    if (!copies.empty()) {
      device::Copy& before = copies.back();
      const bool next = static_cast<const std::byte*>(before.source) + before.bytes == from &&
                        static_cast<std::byte*>(before.target) + before.bytes == to;
      if (next) {
        before.bytes += gradient.nbytes();
        continue;
      }
    }
    copies.push_back({to, from, gradient.nbytes()});
  }
  if (copies.empty()) return;
  device_.wait(LaneKind::reduce, device_.record(LaneKind::compute));  // late rows are added there
  device_.copy_all(LaneKind::reduce, "down " + group.name, std::move(copies));
}

void HostGradients::finish() {
  const at::NoGradGuard no_grad;
  last_ = nullptr;
  for (auto& [group, host] : groups_) copy(*group);
  device_.wait(LaneKind::host, device_.record(LaneKind::reduce));
  device_.wait(LaneKind::compute, device_.record(LaneKind::reduce));  // what is freed was read there
  for (auto& [group, host] : groups_) {
    for (const auto& parameter : group->parameters) {
      at::Tensor& gradient = parameter->shard.mutable_grad();
      const auto kept = kept_.find(parameter.get());
      if (gradient.defined()) {
        gradient = place_of(*parameter);
        if (kept != kept_.end()) gradient.add_(kept->second);
      } else if (kept != kept_.end()) {
        gradient = kept->second;
      }
    }
  }
  kept_.clear();
  on_the_lanes_.clear();
}

void HostGradients::stay() {
  for (const auto& [group, host] : groups_) {
    for (const auto& parameter : group->parameters) {
      at::Tensor& gradient = parameter->shard.mutable_grad();
      const auto kept = kept_.find(parameter.get());
      if (gradient.defined()) {
        on_the_lanes_[parameter.get()] = {gradient.const_data_ptr(), gradient._version()};
      } else if (kept != kept_.end()) {
        on_the_lanes_.erase(parameter.get());
        gradient = kept->second;
      }
    }
  }
}

}  // namespace fsdpp::runtime
