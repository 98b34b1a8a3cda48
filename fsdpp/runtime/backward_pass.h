#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "fsdpp/runtime/order.h"
#include "fsdpp/runtime/reducer.h"
#include "fsdpp/runtime/residency.h"

namespace fsdpp::runtime {

/// One backward through the model, from its first hook to the end of the outermost graph task: which weight
/// gradients are complete, and whose turn it is to be reduced.
///
/// Readiness is read off the graph task, not counted in forward: a parameter is expected when its accumulator
/// is in the graph task, and seen when the accumulator's hook has run.
class BackwardPass : public std::enable_shared_from_this<BackwardPass> {
 public:
  /// `units[i]`: the groups of unit i. All references must outlive the last hook, or close() is called first.
  BackwardPass(std::vector<std::vector<ParameterGroup*>> units, Reducer& reducer, Residency& residency,
               Order& order, device::Device& device, bool fused);

  /// Puts hooks on the accumulators of all trainable parameters. Once, after construction.
  void watch();

  /// A hook of unit `unit` runs: begins the backward if none is active, gathers the unit and prefetches the
  /// next.
  void reach(int unit);
  /// A tensor made inside `unit`'s forward by a unit within it is on its way back: unless `unit` is through
  /// with its own gradients, its weights may be needed, though its own output may have no part in this
  /// backward.
  void keep(int unit);
  [[nodiscard]] bool active() const noexcept { return active_; }
  [[nodiscard]] const std::vector<ParameterGroup*>& groups_of(int unit) const {
    return units_.at(static_cast<std::size_t>(unit));
  }

  /// The window's last backward (the default), or one whose gradients may stay unreduced.
  void set_last(bool last) noexcept { next_is_last_ = last; }
  /// What the backward under way, or else the one before, was declared when it began.
  [[nodiscard]] bool last() const noexcept { return last_; }

  /// Trainable groups in the order of their reduces, equal on all ranks.
  void set_reduce_order(std::vector<ParameterGroup*> order) { reduce_order_ = std::move(order); }
  [[nodiscard]] const std::vector<ParameterGroup*>& reduce_order() const noexcept { return reduce_order_; }
  /// Groups in the order in which their gradients became complete in the last backward; only those that did.
  [[nodiscard]] const std::vector<ParameterGroup*>& completed() const noexcept { return completed_; }

  /// Ends a backward that raised half-way: what was not reduced yet is forgotten, and reduced as empty, so
  /// that the ranks stay in step. Does nothing when none is active.
  void abandon();
  /// Called at the end of each backward that ran to its end.
  void on_finished(std::function<void()> callback) { on_finished_ = std::move(callback); }

  /// The model goes away: hooks that still exist do nothing from now on.
  void close() noexcept;

  // For Parameter.
  void gather_on_demand(const Parameter& parameter);
  std::optional<GradSink> open(Parameter& parameter);
  bool contribute(Parameter& parameter, const RowWriter& write);
  bool add_rows(Parameter& parameter, const at::Tensor& indices, const at::Tensor& rows);
  void report(Parameter& parameter);
  // For the accumulators' hooks.
  void before_accumulation(Parameter& parameter);
  void accumulated(Parameter& parameter);

  [[nodiscard]] int64_t on_demand_gathers() const noexcept { return on_demand_gathers_; }

 private:
  void begin_if_needed();
  void expect_from_graph();
  void finish();
  void complete_unit(int unit);
  void let_go();
  void reduce_in_turn();
  void reduce_next();
  [[nodiscard]] bool reducing() const noexcept;
  [[nodiscard]] bool may_fuse(const Parameter& parameter);
  void require_not_reduced(const Parameter& parameter) const;

  std::vector<std::vector<ParameterGroup*>> units_;
  Reducer* reducer_;
  Residency& residency_;
  Order& order_;
  device::Device& device_;
  bool fused_;
  bool closed_ = false;
  bool next_is_last_ = true;
  bool last_ = true;
  std::function<void()> on_finished_;

  std::vector<ParameterGroup*> reduce_order_;
  std::vector<ParameterGroup*> completed_;

  bool active_ = false;
  bool accumulates_ = false;         // this graph task runs accumulators (not autograd::grad)
  std::size_t next_ = 0;             // in reduce_order_
  std::vector<int> remaining_;       // per unit: expected parameters not seen yet
  std::vector<bool> complete_;       // per unit
  std::vector<bool> reached_;        // per unit: a hook of it has run in this backward
  std::vector<int> leaving_;         // complete units that are kept until another one is reached
  std::vector<bool> group_reduced_;  // per group id
  int64_t on_demand_gathers_ = 0;
};

}  // namespace fsdpp::runtime
