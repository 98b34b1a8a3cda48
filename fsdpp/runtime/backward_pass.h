#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "fsdpp/runtime/delayed_gradients.h"
#include "fsdpp/runtime/order.h"
#include "fsdpp/runtime/reduce_turns.h"
#include "fsdpp/runtime/reducer.h"
#include "fsdpp/runtime/residency.h"
#include "fsdpp/runtime/segment.h"

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
               Order& order, device::Device& device, HostGradients* host, const Options& options);

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
  [[nodiscard]] bool next_is_last() const noexcept { return next_is_last_; }
  /// What the backward under way, or else the one before, was declared when it began.
  [[nodiscard]] bool last() const noexcept { return last_; }

  [[nodiscard]] ReduceTurns& turns() noexcept { return turns_; }

  /// Writes the weight gradients that were delayed, of `unit` or of all units, and runs the reduces whose
  /// turn has come; gradients are readable after the last. Throws UsageError inside a backward.
  void backward_dw(int unit);
  void backward_dw();

  /// From now on (`true`) reduces are run by reduce() and finish_reduces() alone.
  void set_by_hand(bool by_hand);
  [[nodiscard]] bool by_hand() const noexcept { return by_hand_; }
  /// By hand: the gradients of `unit` are complete, and it is reduced when its turn has come.
  void reduce(int unit);
  /// By hand: all other units are reduced with what they have, and gradients are readable.
  void finish_reduces();
  /// A unit with gradients that wait for backward_dw() or, by hand, for reduces; or -1.
  [[nodiscard]] int waiting() const;
  /// Slots hold gradients of a round that is not over, though no backward is under way.
  [[nodiscard]] bool holds_slots() const noexcept {
    return turns_.open() && (by_hand_ || turns_.under_way()) && !active_;
  }

  /// Ends a backward that raised half-way: what was not reduced yet is forgotten, and reduced as empty, so
  /// that the ranks stay in step. Does nothing when none is active.
  void abandon();
  /// abandon(), and what waits to be reduced by hand is forgotten.
  void drop_waiting();
  /// Called at the end of each backward that ran to its end, and at the end of each round of reduces.
  void on_finished(std::function<void()> callback) { on_finished_ = std::move(callback); }
  void on_reduced(std::function<void()> callback) { on_reduced_ = std::move(callback); }
  /// Called when all gradients of a window are readable, as the last thing in what made them so: a backward
  /// (not one that is given up), backward_dw() or finish_reduces(). What it throws leaves that.
  void on_whole(std::function<void()> callback) { on_whole_ = std::move(callback); }

  /// `segment`'s units come back in the backward of its node; all of them have.
  void expect(const std::shared_ptr<Segment>& segment);
  void returned(const Segment& segment);

  /// The model goes away: hooks that still exist do nothing from now on.
  void close() noexcept;

  // For Parameter.
  void gather_on_demand(const Parameter& parameter);
  std::optional<GradSink> open(Parameter& parameter);
  bool contribute(Parameter& parameter, const RowWriter& write);
  bool add_rows(Parameter& parameter, const at::Tensor& indices, const at::Tensor& rows, RowClaim& claim);
  void report(Parameter& parameter);
  // For the accumulators' hooks.
  void before_accumulation(Parameter& parameter);
  void accumulated(Parameter& parameter);

  [[nodiscard]] int64_t on_demand_gathers() const noexcept { return on_demand_gathers_; }

 private:
  void begin_if_needed();
  void expect_from_graph();
  void expect_segments();
  void complete_if_all_seen(int unit);
  void finish();
  [[nodiscard]] bool end();
  void complete_unit(int unit);
  void let_go();
  [[nodiscard]] bool end_round();
  void tell_whole() const;
  void write_delayed(int unit);
  void take_found(Parameter& parameter);
  void take_found(int unit);
  [[nodiscard]] bool may_fuse(const Parameter& parameter);
  void require_none_under_way(const char* what) const;
  void require_not_reduced(const Parameter& parameter) const;
  [[nodiscard]] std::vector<ParameterGroup*> by_rows() const;  // those with a RowExchange

  std::vector<std::vector<ParameterGroup*>> units_;
  Reducer* reducer_;
  Residency& residency_;
  Order& order_;
  device::Device& device_;
  bool fused_;
  bool delay_;
  bool by_hand_ = false;
  bool closed_ = false;
  bool next_is_last_ = true;
  bool last_ = true;
  std::function<void()> on_finished_;
  std::function<void()> on_reduced_;
  std::function<void()> on_whole_;
  ReduceTurns turns_;
  DelayedGradients delayed_;

  bool active_ = false;
  bool accumulates_ = false;     // this graph task runs accumulators (not autograd::grad)
  std::vector<int> remaining_;   // per unit: expected parameters not seen yet
  std::vector<int> recomputed_;  // per unit: forwards in segments of this graph that have not come back
  std::vector<std::weak_ptr<Segment>> segments_;
  std::vector<bool> complete_;  // per unit
  std::vector<bool> reached_;   // per unit: a hook of it has run in this backward
  std::vector<int> leaving_;    // complete units that are kept until another one is reached
  int64_t on_demand_gathers_ = 0;
};

}  // namespace fsdpp::runtime
