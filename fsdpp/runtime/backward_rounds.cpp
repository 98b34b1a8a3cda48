// BackwardPass between backwards: weight gradients that were delayed, and reduces by hand.
#include "fsdpp/base/error.h"
#include "fsdpp/runtime/backward_pass.h"

namespace fsdpp::runtime {

// Says whether it was its window's last.
bool BackwardPass::end_round() {
  if (!turns_.open()) return false;
  const bool whole = turns_.end();
  if (on_reduced_) on_reduced_();
  return whole;
}

void BackwardPass::tell_whole() const {
  if (on_whole_) on_whole_();
}

void BackwardPass::require_none_under_way(const char* what) const {
  require(!active_, what,
          " inside a backward, or after one that raised; call it when backward() has returned, "
          "and after an error give the backward up with zero_grad()");
}

void BackwardPass::write_delayed(int unit) {
  const at::NoGradGuard no_grad;
  for (const DelayedGradients::Entry& entry : delayed_.take(unit)) {
    Parameter& parameter = *entry.parameter;
    require_not_reduced(parameter);
    if (entry.by_rows) {
      reducer_->contribute(parameter, entry.write);
      continue;
    }
    run_writer(device_, "wgrad " + parameter.name, reducer_->open(parameter), {}, entry.write);
    parameter.contributed = true;
  }
}

void BackwardPass::backward_dw(int unit) {
  require_none_under_way("backward_dw()");
  if (!delayed_.any()) return;
  write_delayed(unit);
  if (by_hand_) return;
  for (int other = 0; other < static_cast<int>(units_.size()); ++other) {
    if (!delayed_.any(other)) turns_.complete(other);
  }
  turns_.advance();
  if (!delayed_.any() && end_round()) tell_whole();
}

void BackwardPass::backward_dw() {
  require_none_under_way("backward_dw()");
  std::vector<bool> done(units_.size());
  for (const ParameterGroup* group : turns_.order()) {  // units in the order of their reduces
    const auto unit = static_cast<std::size_t>(group->unit);
    if (!done[unit]) backward_dw(group->unit);
    done[unit] = true;
  }
}

void BackwardPass::set_by_hand(bool by_hand) {
  require_none_under_way("reduce_by_hand()");
  require(!turns_.open(),
          "reduce_by_hand() while gradients wait to be reduced; call finish_reduces(), or "
          "backward_dw(), first");
  by_hand_ = by_hand;
  for (const auto& unit : units_) {
    for (ParameterGroup* group : unit) {
      if (!group->trainable) continue;
      for (const auto& parameter : group->parameters)
        parameter->full.mutable_grad() = by_hand ? at::Tensor() : parameter->guard_grad;
    }
  }
}

void BackwardPass::reduce(int unit) {
  require_none_under_way("reduce()");
  require(by_hand_,
          "reduce() of a unit, but reduces are run by the backward; call reduce_by_hand(true) first");
  const auto& groups = units_[static_cast<std::size_t>(unit)];  // none in a unit without parameters
  require(!delayed_.any(unit), "reduce() of unit ", groups.empty() ? "" : groups.front()->name,
          ", whose weight gradients are delayed; call backward_dw() first");
  take_found(unit);
  if (!turns_.open()) turns_.begin(next_is_last_);
  turns_.complete(unit);
  turns_.advance();
}

void BackwardPass::finish_reduces() {
  require_none_under_way("finish_reduces()");
  require(by_hand_, "finish_reduces(), but reduces are run by the backward; call reduce_by_hand(true) first");
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    require(!delayed_.any(unit), "finish_reduces() while weight gradients of unit ",
            delayed_.any(unit) ? units_[static_cast<std::size_t>(unit)].front()->name : "",
            " are delayed; call backward_dw() first");
    take_found(unit);
  }
  if (!turns_.open()) turns_.begin(next_is_last_);
  if (end_round()) tell_whole();
}

int BackwardPass::waiting() const {
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    if (delayed_.any(unit)) return unit;
  }
  const bool waits = turns_.open() && !active_ && !turns_.order().empty();
  return waits ? turns_.order().front()->unit : -1;
}

}  // namespace fsdpp::runtime
