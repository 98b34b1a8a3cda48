#include "fsdpp/runtime/backward_pass.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/runtime/graph_task.h"
#include "fsdpp/runtime/row_exchange.h"

namespace fsdpp::runtime {
namespace {

using torch::autograd::variable_list;

class BeforeAccumulation final : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeAccumulation(std::weak_ptr<Parameter> parameter) : parameter_(std::move(parameter)) {}
  variable_list operator()(const variable_list& gradients) override {
    const auto parameter = parameter_.lock();
    if (parameter && parameter->backward != nullptr) parameter->backward->before_accumulation(*parameter);
    return gradients;
  }

 private:
  std::weak_ptr<Parameter> parameter_;
};

class AfterAccumulation final : public torch::autograd::FunctionPostHook {
 public:
  explicit AfterAccumulation(std::weak_ptr<Parameter> parameter) : parameter_(std::move(parameter)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    const auto parameter = parameter_.lock();
    if (parameter && parameter->backward != nullptr) parameter->backward->accumulated(*parameter);
    return outputs;
  }

 private:
  std::weak_ptr<Parameter> parameter_;
};

// Somebody looks at the whole gradient of `weight`, so it has to exist.
bool is_hooked(const at::Tensor& weight) {
  return !torch::autograd::impl::hooks(weight).empty() ||
         torch::autograd::impl::post_acc_grad_hooks(weight) != nullptr;
}

}  // namespace

BackwardPass::BackwardPass(std::vector<std::vector<ParameterGroup*>> units, Reducer& reducer,
                           Residency& residency, Order& order, device::Device& device, HostGradients* host,
                           const Options& options)
    : units_(std::move(units)),
      reducer_(&reducer),
      residency_(residency),
      order_(order),
      device_(device),
      fused_(options.fused),
      delay_(options.delay_wgrad),
      turns_(units_, reducer, host),
      delayed_(units_.size()),
      remaining_(units_.size()),
      recomputed_(units_.size()),
      complete_(units_.size()),
      reached_(units_.size()) {}

void BackwardPass::watch() {
  for (const auto& unit : units_) {
    for (ParameterGroup* group : unit) {
      for (const auto& parameter : group->parameters) {
        parameter->backward = this;
        if (!group->trainable) continue;
        parameter->accumulator = torch::autograd::impl::grad_accumulator(parameter->full);
        parameter->accumulator->add_pre_hook(std::make_unique<BeforeAccumulation>(parameter));
        parameter->accumulator->add_post_hook(std::make_unique<AfterAccumulation>(parameter));
        parameter->full.mutable_grad() = parameter->guard_grad;
      }
    }
  }
}

void BackwardPass::close() noexcept {
  closed_ = true;
  for (const auto& unit : units_) {
    for (ParameterGroup* group : unit) {
      for (const auto& parameter : group->parameters) parameter->backward = nullptr;
    }
  }
}

void BackwardPass::begin_if_needed() {
  if (active_) return;  // also inside a reentrant graph task: the outermost one ends the pass
  FSDPP_INVARIANT(torch::autograd::get_current_graph_task_id() != -1, "a backward hook outside a backward");
  expect_from_graph();
  expect_segments();
  if (accumulates_) turns_.begin(next_is_last_);
  active_ = true;
  leaving_.clear();
  std::fill(complete_.begin(), complete_.end(), false);
  std::fill(reached_.begin(), reached_.end(), false);
  order_.begin();
  last_ = next_is_last_;
  delayed_.begin();
  for (ParameterGroup* group : by_rows()) group->rows->begin();
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto self = weak.lock(); self && !self->closed_) self->finish();
  });
}

void BackwardPass::expect_from_graph() {
  std::fill(remaining_.begin(), remaining_.end(), 0);
  accumulates_ = is_plain_backward();
  for (const auto& unit : units_) {
    for (ParameterGroup* group : unit) {
      if (!group->trainable) continue;
      for (const auto& parameter : group->parameters) {
        parameter->expected = runs_in_graph_task(parameter->accumulator.get());
        parameter->seen = false;
        if (!parameter->expected) continue;
        ++remaining_[static_cast<std::size_t>(group->unit)];
        accumulates_ = true;
        before_accumulation(*parameter);
      }
    }
  }
}

void BackwardPass::reach(int unit) {
  begin_if_needed();
  const auto index = static_cast<std::size_t>(unit);
  std::erase(leaving_, unit);
  let_go();
  residency_.hold(unit, Hold::backward);
  residency_.drop_all(unit, Hold::prefetch);
  announce_use(device_, "backward", units_[index]);
  if (reached_[index]) return;
  reached_[index] = true;
  device_.stay_near();
  order_.arrive(unit);
  residency_.prefetch(order_);
}

void BackwardPass::keep(int unit) {
  if (complete_[static_cast<std::size_t>(unit)] || residency_.resident(unit)) return;
  residency_.hold(unit, Hold::backward);
}

void BackwardPass::let_go() {
  for (const int unit : leaving_) {
    order_.leave(unit);
    residency_.drop_all(unit, Hold::backward);
  }
  leaving_.clear();
}

void BackwardPass::gather_on_demand(const Parameter& parameter) {
  const int unit = parameter.group->unit;
  if (residency_.resident(unit) || parameter.group->published == std::nullopt) return;
  require(parameter.group->is_gathered(), "parameter ", parameter.name,
          " is exchanged by rows: nothing but lookups may read it; give its unit Use::rows_and_whole");
  begin_if_needed();
  ++on_demand_gathers_;
  residency_.hold(unit, Hold::backward);
  announce_use(device_, "backward on demand", units_[static_cast<std::size_t>(unit)]);
}

void BackwardPass::require_not_reduced(const Parameter& parameter) const {
  require(!turns_.reduced(*parameter.group), "parameter ", parameter.name, " got a gradient after unit ",
          parameter.group->name,
          " was reduced in the same backward; a nested backward (reentrant checkpoint) over weights that the "
          "outer "
          "graph uses too is not supported: put the checkpoint around all of their uses");
}

// Inside a backward; by hand, a slot is taken at any time.
bool BackwardPass::may_fuse(const Parameter& parameter) {
  if (by_hand_ && torch::autograd::get_current_graph_task_id() == -1) {
    if (!fused_ || !parameter.group->trainable) return false;
    if (!turns_.open()) turns_.begin(next_is_last_);
    require_not_reduced(parameter);
    return true;
  }
  begin_if_needed();
  if (!fused_ || !parameter.group->trainable || is_hooked(parameter.full)) return false;
  if (!runs_in_graph_task(parameter.accumulator.get())) return false;
  require_not_reduced(parameter);
  return true;
}

std::optional<GradSink> BackwardPass::open(Parameter& parameter) {
  if (!may_fuse(parameter)) return std::nullopt;
  if (delay_) {
    parameter.staged =
        at::empty(parameter.sizes, at::TensorOptions(parameter.group->place).dtype(at::kFloat));
    return GradSink{parameter.staged, GradSink::Mode::overwrite};
  }
  GradSink sink = reducer_->open(parameter);
  announce_write(device_, parameter, sink);
  return sink;
}

bool BackwardPass::contribute(Parameter& parameter, const RowWriter& write) {
  require(!parameter.sizes.empty(), "parameter ", parameter.name,
          " is a scalar: its gradient has no rows; take the sink from open()");
  if (!may_fuse(parameter)) return false;
  if (delay_) {
    delayed_.add(parameter, write, /*by_rows=*/true);
  } else {
    reducer_->contribute(parameter, write);
  }
  return true;
}

bool BackwardPass::add_rows(Parameter& parameter, const at::Tensor& indices, const at::Tensor& rows,
                            RowClaim& claim) {
  begin_if_needed();
  if (!runs_in_graph_task(parameter.accumulator.get())) return false;
  require(!is_hooked(parameter.full), "parameter ", parameter.name,
          " has a hook, but its gradient is exchanged by rows and never exists as a whole; remove the "
          "hook, or "
          "shard with Options{.row_exchange_bytes = -1}");
  require_not_reduced(parameter);
  parameter.group->rows->add(indices, rows, claim);
  return true;
}

void BackwardPass::report(Parameter& parameter) {
  if (parameter.staged.defined()) {
    delayed_.add(parameter, writer_of(std::exchange(parameter.staged, {})), /*by_rows=*/false);
  } else {
    parameter.contributed = true;
  }
}

// The guard gives way to what autograd brings.
void BackwardPass::before_accumulation(Parameter& parameter) {
  if (parameter.full.grad().is_same(parameter.guard_grad)) parameter.full.mutable_grad().reset();
}

// What autograd, or the user, left in a full weight's `.grad`.
void BackwardPass::take_found(Parameter& parameter) {
  at::Tensor& found = parameter.full.mutable_grad();
  if (!found.defined() || found.is_same(parameter.guard_grad)) return;
  const at::NoGradGuard no_grad;
  require_not_reduced(parameter);
  if (!turns_.open()) turns_.begin(next_is_last_);
  RowWriter write = writer_of(found.is_sparse() ? found.to_dense() : found);
  if (delay_ && active_) {
    delayed_.add(parameter, std::move(write), /*by_rows=*/false);
  } else {
    run_writer(device_, "grad " + parameter.name, reducer_->open(parameter), {}, write);
    parameter.contributed = true;
  }
  found.reset();
}

void BackwardPass::take_found(int unit) {
  for (ParameterGroup* group : units_[static_cast<std::size_t>(unit)]) {
    if (!group->trainable) continue;
    for (const auto& parameter : group->parameters) take_found(*parameter);
  }
}

void BackwardPass::accumulated(Parameter& parameter) {
  begin_if_needed();
  take_found(parameter);
  if (!parameter.expected || parameter.seen) return;
  parameter.seen = true;
  --remaining_[static_cast<std::size_t>(parameter.group->unit)];
  complete_if_all_seen(parameter.group->unit);
}

void BackwardPass::complete_if_all_seen(int unit) {
  const auto index = static_cast<std::size_t>(unit);
  if (remaining_[index] == 0 && recomputed_[index] == 0 && !complete_[index]) complete_unit(unit);
}

void BackwardPass::expect(const std::shared_ptr<Segment>& segment) {
  std::erase_if(segments_, [](const auto& known) { return known.expired(); });
  segments_.push_back(segment);
}

// In the graph of the backward that begins; those made while it runs belong to units of one of them.
void BackwardPass::expect_segments() {
  std::fill(recomputed_.begin(), recomputed_.end(), 0);
  for (const std::weak_ptr<Segment>& known : segments_) {
    const auto segment = known.lock();
    if (segment == nullptr || !runs_in_graph_task(segment->node())) continue;
    for (const int unit : segment->units_of(*this)) ++recomputed_[static_cast<std::size_t>(unit)];
  }
}

void BackwardPass::returned(const Segment& segment) {
  if (!active_ || closed_) return;
  for (const int unit : segment.units_of(*this)) {
    int& count = recomputed_[static_cast<std::size_t>(unit)];
    if (count > 0 && --count == 0) complete_if_all_seen(unit);
  }
}

void BackwardPass::complete_unit(int unit) {
  complete_[static_cast<std::size_t>(unit)] = true;
  const auto& groups = units_[static_cast<std::size_t>(unit)];
  const bool frozen = std::any_of(groups.begin(), groups.end(),
                                  [](const ParameterGroup* group) { return !group->trainable; });
  // Input gradients may still need weights when the weights' own gradients are done: frozen ones, which stay
  // to the end, or others through detach(), which stay until the next unit is reached.
  if (!frozen) leaving_.push_back(unit);
  if (delay_ || by_hand_) return;
  take_found(unit);
  turns_.complete(unit);
  turns_.advance();
}

void BackwardPass::abandon() {
  if (!active_) return;
  reducer_->forget();
  delayed_.forget_last();
  for (ParameterGroup* group : by_rows()) {
    if (delay_) {
      group->rows->forget_last();  // what was delayed before stays
    } else {
      group->rows->forget();
    }
  }
  static_cast<void>(end());  // its gradients are nobody's
}

void BackwardPass::drop_waiting() {
  abandon();
  if (!by_hand_ || !turns_.open()) return;
  reducer_->forget();
  for (ParameterGroup* group : by_rows()) group->rows->forget();
}

std::vector<ParameterGroup*> BackwardPass::by_rows() const {
  std::vector<ParameterGroup*> groups;
  for (const auto& unit : units_) {
    std::copy_if(unit.begin(), unit.end(), std::back_inserter(groups),
                 [](const ParameterGroup* group) { return group->rows != nullptr; });
  }
  return groups;
}

void BackwardPass::finish() {
  if (!active_ || !end()) return;
  // When all models' backwards in this graph have ended: what is called may throw.
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto self = weak.lock(); self && !self->closed_) self->tell_whole();
  });
}

// Says whether a window's gradients became readable.
bool BackwardPass::end() {
  bool whole = false;
  let_go();
  if (accumulates_) {
    for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) take_found(unit);
    if (!by_hand_ && !delayed_.any()) whole = end_round();
  }
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    if (residency_.holds(unit, Hold::backward) > 0) order_.leave(unit);
    for (ParameterGroup* group : units_[static_cast<std::size_t>(unit)]) {
      if (!group->trainable) continue;
      for (const auto& parameter : group->parameters) {
        if (!by_hand_) parameter->full.mutable_grad() = parameter->guard_grad;
      }
    }
  }
  residency_.drop_all(Hold::backward);
  residency_.drop_all(Hold::prefetch);
  device_.rejoin(device::LaneKind::compute, "end of backward");
  active_ = false;
  if (accumulates_ && on_finished_) on_finished_();
  return whole;
}

}  // namespace fsdpp::runtime
