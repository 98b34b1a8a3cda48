#include "fsdpp/runtime/core.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "fsdpp/base/error.h"

namespace fsdpp::runtime {

void Core::begin_forward() {
  if (torch::autograd::get_current_graph_task_id() == -1 && backward->active()) backward->abandon();
  residency->drop_all(Hold::prefetch);
  refresh();  // or refuses, before anything is changed
  autocast_cache_ = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_cache_enabled(false);  // it would hand out a copy of last step's weight
}

std::shared_ptr<Pass> Core::enter(int index) {
  UnitState& unit = units[static_cast<std::size_t>(index)];
  check_parameters(unit);
  const bool recompute = torch::autograd::get_current_graph_task_id() != -1;
  auto pass = std::make_shared<Pass>(index, at::GradMode::is_enabled(), recompute);
  if (pass->with_gradient()) unit.passes.add(pass);
  if (Segment* segment = Segment::current()) segment->note(backward, index);
  if (recompute) {
    backward->reach(index);  // a hold that the unit's own backward drops; no slot, no release of ours
    return pass;
  }
  if (entered_.empty()) {
    begin_forward();
    root_pass_ = index == 0;
    root_with_gradient_ = pass->with_gradient();
    if (root_pass_) current_order().begin();
    if (root_pass_ && root_with_gradient_) residency->keep_parts();
  }
  entered_.push_back(index);
  device->stay_near();
  residency->hold(index, Hold::forward);
  residency->drop_all(index, Hold::prefetch);
  announce_use(*device, "forward", backward->groups_of(index));
  if (root_pass_) {
    current_order().arrive(index);
    residency->prefetch(current_order());
  }
  return pass;
}

void Core::leave(const std::shared_ptr<Pass>& pass, at::Tensor& output) {
  const auto dtype = units[static_cast<std::size_t>(pass->unit())].options.output_dtype;
  if (dtype && output.defined() && output.is_floating_point()) output = output.to(*dtype);
  if (!pass->with_gradient() || !output.defined() || !output.requires_grad() || !output.grad_fn()) return;
  std::vector<int> around = entered_;  // the units whose forward this one is part of
  std::erase(around, pass->unit());
  output.register_hook([weak = std::weak_ptr<BackwardPass>(backward), pass, around](const at::Tensor&) {
    if (const auto self = weak.lock()) {
      pass->move_to(Phase::backward);
      self->reach(pass->unit());
      for (const int unit : around) self->keep(unit);
    }
  });
}

void Core::finish(const std::shared_ptr<Pass>& pass, bool raised) {
  pass->move_to(raised ? Phase::abandoned : pass->with_gradient() ? Phase::waiting : Phase::done);
  if (pass->recompute()) return;
  const int index = pass->unit();
  if (root_pass_) current_order().leave(index);
  // What the backward needs first stays: the root, and the unit visited last.
  const bool comes_back_first =
      root_with_gradient_ && root_pass_ && !raised &&
      (index == 0 || (backward_order.expected().size() > 1 && backward_order.expected()[1].unit == index));
  if (comes_back_first) residency->hold(index, Hold::prefetch);
  residency->drop(index, Hold::forward);
  entered_.pop_back();
  if (entered_.empty()) {
    if (root_pass_ && !raised) orders_changed_ = current_order().complete() || orders_changed_;
    if (root_pass_ && root_with_gradient_ && !raised) residency->complete_parts();
    end_forward(raised);
  }
}

void Core::end_forward(bool raised) {
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
  root_pass_ = false;
  if (!raised) return;
  residency->drop_all(Hold::forward);
  residency->drop_all(Hold::prefetch);
}

void Core::check_parameters(const UnitState& unit) const {
  for (const auto& unit_group : unit.groups) {
    for (const auto& parameter : unit_group->parameters) {
      const at::Tensor& full = parameter->full;
      const auto* storage = full.has_storage() ? full.storage().unsafeGetStorageImpl() : nullptr;
      const bool ours = storage == unit_group->real.unsafeGetStorageImpl() ||
                        storage == unit_group->guard.unsafeGetStorageImpl();
      const char* what = nullptr;
      if (!ours || full.scalar_type() != unit_group->dtype) {
        what = "its storage was replaced (to(), set_data or load after sharding)";
      } else if (full.requires_grad() != unit_group->trainable) {
        what = "its requires_grad was changed";
      } else if (unit_group->trainable &&
                 torch::autograd::impl::try_get_grad_accumulator(full) != parameter->accumulator) {
        what = "its gradient accumulator was replaced";
      }
      require(what == nullptr, "parameter ", parameter->name, " of unit ", unit.name, ": ",
              what == nullptr ? "" : what,
              " since fully_shard(); make such changes before fully_shard(), or shard a new module");
    }
  }
}

// After a backward that raised, reduces may still read and write what is cleared here, this rank's and
// peers'.
void Core::zero_grad(bool set_to_none) {
  if (torch::autograd::get_current_graph_task_id() == -1) backward->drop_waiting();
  if (host_gradients) host_gradients->cleared();
  const at::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    at::Tensor& gradient = parameter->shard.mutable_grad();
    if (!gradient.defined()) continue;
    if (set_to_none) {
      gradient.reset();
    } else {
      gradient.zero_();
    }
  }
  if (set_to_none) reducer->cleared();
}

void Core::weights_changed() { window_open_ = false; }

void Core::hold_all(bool held) {
  if (held) refresh();
  for (int unit = 0; unit < static_cast<int>(units.size()); ++unit) {
    if (held) {
      residency->hold(unit, Hold::user);
    } else {
      residency->drop_all(unit, Hold::user);
    }
  }
}

}  // namespace fsdpp::runtime
