#include "fsdpp/runtime/backward_pass.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
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

}  // namespace

BackwardPass::BackwardPass(std::vector<std::vector<ParameterGroup*>> units, Reducer& reducer,
                           Residency& residency, Order& order, device::Device& device, bool fused)
    : units_(std::move(units)),
      reducer_(&reducer),
      residency_(residency),
      order_(order),
      device_(device),
      fused_(fused),
      remaining_(units_.size()),
      complete_(units_.size()),
      reached_(units_.size()) {
  int groups = 0;
  for (const auto& unit : units_) groups += static_cast<int>(unit.size());
  group_reduced_.resize(static_cast<std::size_t>(groups));
}

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

bool BackwardPass::reducing() const noexcept {
  return accumulates_ && (last_ || reducer_->reduces_every_backward());
}

void BackwardPass::begin_if_needed() {
  if (active_) return;  // also inside a reentrant graph task: the outermost one ends the pass
  FSDPP_INVARIANT(torch::autograd::get_current_graph_task_id() != -1, "a backward hook outside a backward");
  active_ = true;
  next_ = 0;
  completed_.clear();
  leaving_.clear();
  std::fill(complete_.begin(), complete_.end(), false);
  std::fill(reached_.begin(), reached_.end(), false);
  std::fill(group_reduced_.begin(), group_reduced_.end(), false);
  order_.begin();
  last_ = next_is_last_;
  reducer_->begin(last_);
  expect_from_graph();
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
        parameter->full.mutable_grad().reset();  // the guard gives way to what autograd brings
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
  const int next = order_.arrive(unit);
  if (next >= 0 && !residency_.resident(next)) residency_.hold(next, Hold::prefetch);
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
  require(!group_reduced_[static_cast<std::size_t>(parameter.group->id)], "parameter ", parameter.name,
          " got a gradient after unit ", parameter.group->name,
          " was reduced in the same backward; a nested backward (reentrant checkpoint) over weights that the "
          "outer "
          "graph uses too is not supported: put the checkpoint around all of their uses");
}

bool BackwardPass::may_fuse(const Parameter& parameter) {
  begin_if_needed();
  const bool hooked = !torch::autograd::impl::hooks(parameter.full).empty();
  if (!fused_ || !parameter.group->trainable || hooked) return false;
  if (!runs_in_graph_task(parameter.accumulator.get())) return false;
  require_not_reduced(parameter);
  return true;
}

std::optional<GradSink> BackwardPass::open(Parameter& parameter) {
  if (!may_fuse(parameter)) return std::nullopt;
  GradSink sink = reducer_->open(parameter);
  announce_write(device_, parameter, sink);
  return sink;
}

bool BackwardPass::contribute(Parameter& parameter, const RowWriter& write) {
  require(!parameter.sizes.empty(), "parameter ", parameter.name,
          " is a scalar: its gradient has no rows; take the sink from open()");
  if (!may_fuse(parameter)) return false;
  reducer_->contribute(parameter, write);
  return true;
}

bool BackwardPass::add_rows(Parameter& parameter, const at::Tensor& indices, const at::Tensor& rows) {
  begin_if_needed();
  if (!runs_in_graph_task(parameter.accumulator.get())) return false;
  require(torch::autograd::impl::hooks(parameter.full).empty(), "parameter ", parameter.name,
          " has a tensor hook, but its gradient is exchanged by rows and never exists as a whole; remove the "
          "hook, or "
          "shard with Options{.row_exchange_bytes = -1}");
  require_not_reduced(parameter);
  parameter.group->rows->add(indices, rows);
  return true;
}

void BackwardPass::report(Parameter& parameter) { parameter.contributed = true; }

void BackwardPass::before_accumulation(Parameter& parameter) {
  begin_if_needed();
  if (parameter.full.grad().is_same(parameter.guard_grad)) parameter.full.mutable_grad().reset();
}

void BackwardPass::accumulated(Parameter& parameter) {
  begin_if_needed();
  at::Tensor& brought = parameter.full.mutable_grad();
  if (brought.defined()) {
    const at::NoGradGuard no_grad;
    require_not_reduced(parameter);
    const at::Tensor gradient = brought.is_sparse() ? brought.to_dense() : brought;
    run_writer(device_, "grad " + parameter.name, reducer_->open(parameter), {},
               [gradient](const GradSink& sink, int64_t, int64_t) {
                 if (sink.mode == GradSink::Mode::add) {
                   sink.view.add_(gradient);
                 } else {
                   sink.view.copy_(gradient);
                 }
               });
    report(parameter);
    brought.reset();
  }
  if (!parameter.expected || parameter.seen) return;
  parameter.seen = true;
  if (--remaining_[static_cast<std::size_t>(parameter.group->unit)] == 0)
    complete_unit(parameter.group->unit);
}

void BackwardPass::complete_unit(int unit) {
  complete_[static_cast<std::size_t>(unit)] = true;
  bool frozen = false;
  for (ParameterGroup* group : units_[static_cast<std::size_t>(unit)]) {
    frozen = frozen || !group->trainable;
    if (group->trainable) completed_.push_back(group);
  }
  // Input gradients may still need weights when the weights' own gradients are done: frozen ones, which stay
  // to the end, or others through detach(), which stay until the next unit is reached.
  if (!frozen) leaving_.push_back(unit);
  reduce_in_turn();
}

void BackwardPass::reduce_in_turn() {
  if (!reducing()) return;
  while (next_ < reduce_order_.size() && complete_[static_cast<std::size_t>(reduce_order_[next_]->unit)]) {
    ParameterGroup* group = reduce_order_[next_];
    reduce_next();
    group_reduced_[static_cast<std::size_t>(group->id)] = true;
  }
}

// What is refused is so before anything is done, and the group keeps its turn.
void BackwardPass::reduce_next() {
  ParameterGroup* group = reduce_order_[next_];
  reducer_->check(*group);
  ++next_;
  reducer_->reduce(*group);
}

void BackwardPass::abandon() {
  if (!active_) return;
  reducer_->forget();
  for (const auto& unit : units_) {
    for (ParameterGroup* group : unit) {
      if (group->rows != nullptr) group->rows->forget();
    }
  }
  finish();
}

void BackwardPass::finish() {
  if (!active_) return;
  let_go();
  if (reducing()) {
    while (next_ < reduce_order_.size()) reduce_next();
    reducer_->finish();
  }
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    if (residency_.holds(unit, Hold::backward) > 0) order_.leave(unit);
    for (ParameterGroup* group : units_[static_cast<std::size_t>(unit)]) {
      if (!group->trainable) continue;
      for (const auto& parameter : group->parameters) parameter->full.mutable_grad() = parameter->guard_grad;
    }
  }
  residency_.drop_all(Hold::backward);
  residency_.drop_all(Hold::prefetch);
  device_.rejoin(device::LaneKind::compute, "end of backward");
  active_ = false;
  if (accumulates_ && on_finished_) on_finished_();
}

BackwardPass& Parameter::live() const {
  require(backward != nullptr, "the sharded model of parameter ", name,
          " no longer exists; keep it alive until its last backward");
  return *backward;
}

void Parameter::ensure_resident() { live().gather_on_demand(*this); }

std::optional<GradSink> Parameter::open() {
  BackwardPass& pass = live();
  require_no_graph();
  return pass.open(*this);
}

void Parameter::report() { live().report(*this); }

bool Parameter::contribute(const RowWriter& write) {
  BackwardPass& pass = live();
  require_no_graph();
  return pass.contribute(*this, write);
}

bool Parameter::exchanges_rows() const noexcept { return group->rows != nullptr; }

at::Tensor Parameter::gather_rows(const at::Tensor& indices, bool with_gradient) {
  static_cast<void>(live());
  return group->rows->gather(indices, with_gradient);
}

bool Parameter::add_rows(const at::Tensor& indices, const at::Tensor& rows) {
  BackwardPass& pass = live();
  require_no_graph();
  return pass.add_rows(*this, indices, rows);
}

void Parameter::require_no_graph() const {
  require(!at::GradMode::is_enabled(), "parameter ", name,
          ": a fused weight gradient has no graph, but this backward was asked for one (create_graph); "
          "use Options{.fused = false} for higher derivatives");
}

}  // namespace fsdpp::runtime
