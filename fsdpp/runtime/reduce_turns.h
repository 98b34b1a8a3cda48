#pragma once

#include <vector>

#include "fsdpp/runtime/host_gradients.h"
#include "fsdpp/runtime/parameter_group.h"
#include "fsdpp/runtime/reducer.h"

namespace fsdpp::runtime {

/// Whose turn it is to be reduced: in one order on all ranks, each unit's groups when their gradients are
/// complete.
///
/// A round is what ends with one reduce of every group: one backward; or, where reduces wait for
/// backward_dw() or are run by hand, all backwards until then, whose contributions add up.
class ReduceTurns {
 public:
  /// `units[i]`: the groups of unit i, trainable or not.
  /// `host`: brings gradients down to host memory; null: they stay.
  ReduceTurns(const std::vector<std::vector<ParameterGroup*>>& units, Reducer& reducer, HostGradients* host);

  /// Trainable groups in the order of their reduces, equal on all ranks.
  void set_order(std::vector<ParameterGroup*> order) { order_ = std::move(order); }
  [[nodiscard]] const std::vector<ParameterGroup*>& order() const noexcept { return order_; }
  /// Groups in the order in which their gradients became complete in the last round; only those that did.
  [[nodiscard]] const std::vector<ParameterGroup*>& completed() const noexcept { return completed_; }

  /// A backward begins (`last`: its window's last one): a new round, or more of the one that is open. Throws
  /// UsageError when that has reduced a group already.
  void begin(bool last);
  /// The gradients of `unit` are complete in this round.
  void complete(int unit);
  /// Runs the reduces whose turn has come.
  void advance();
  /// Ends the round: what is not complete is reduced with what it has, and gradients are readable. Says
  /// whether they are those of a whole window.
  [[nodiscard]] bool end();

  [[nodiscard]] bool open() const noexcept { return open_; }
  /// The open round has reduced a group, or knows one to be complete.
  [[nodiscard]] bool under_way() const noexcept { return open_ && !completed_.empty(); }
  [[nodiscard]] bool reduced(const ParameterGroup& group) const {
    return open_ && reduced_[static_cast<std::size_t>(group.id)];
  }

 private:
  [[nodiscard]] bool any_reduced() const noexcept;
  [[nodiscard]] bool is_due(const ParameterGroup& group) const noexcept;
  void reduce_next();

  const std::vector<std::vector<ParameterGroup*>>& units_;
  Reducer& reducer_;
  HostGradients* host_;
  std::vector<ParameterGroup*> order_;
  std::vector<ParameterGroup*> completed_;
  std::size_t next_ = 0;        // in order_
  std::vector<bool> complete_;  // per unit
  std::vector<bool> reduced_;   // per group id
  bool open_ = false;
  bool last_ = true;   // of its window, the newest backward is
  bool owed_ = false;  // the round ends a window: not all its backwards leave gradients to a later one
};

}  // namespace fsdpp::runtime
