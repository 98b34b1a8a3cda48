#include "fsdpp/runtime/reduce_turns.h"

#include <algorithm>
#include <functional>

#include "fsdpp/base/error.h"

namespace fsdpp::runtime {

ReduceTurns::ReduceTurns(const std::vector<std::vector<ParameterGroup*>>& units, Reducer& reducer,
                         HostGradients* host)
    : units_(units), reducer_(reducer), host_(host), complete_(units.size()) {
  std::size_t groups = 0;
  for (const auto& unit : units) groups += unit.size();
  reduced_.resize(groups);
}

void ReduceTurns::begin(bool last) {
  require(!open_ || !any_reduced(), "a backward begins while unit ",
          open_ && next_ < order_.size() ? order_[next_]->name : "",
          " and others have still to be reduced for an earlier one; run backward_dw() (or, by hand, "
          "finish_reduces()) first, or before it no unit's");
  if (!open_) std::fill(reduced_.begin(), reduced_.end(), false);
  if (!open_ && host_ != nullptr) host_->begin();
  std::fill(complete_.begin(), complete_.end(), false);
  completed_.clear();
  next_ = 0;
  open_ = true;
  last_ = last;
  owed_ = owed_ || last;
  reducer_.begin(last);
}

void ReduceTurns::complete(int unit) {
  const auto index = static_cast<std::size_t>(unit);
  if (complete_[index]) return;
  complete_[index] = true;
  for (ParameterGroup* group : units_[index]) {
    if (group->trainable) completed_.push_back(group);
  }
}

bool ReduceTurns::any_reduced() const noexcept {
  return std::any_of(reduced_.begin(), reduced_.end(), std::identity());
}

// Only a window's end reduces gradients that are not sharded.
bool ReduceTurns::is_due(const ParameterGroup& group) const noexcept {
  return owed_ || shards_gradients(group.strategy);
}

void ReduceTurns::advance() {
  while (next_ < order_.size() && complete_[static_cast<std::size_t>(order_[next_]->unit)]) reduce_next();
}

// What is refused is so before anything is done, and the group keeps its turn.
void ReduceTurns::reduce_next() {
  ParameterGroup* group = order_[next_];
  const bool due = is_due(*group);
  if (due) reducer_.check(*group);
  ++next_;
  if (!due) return;
  reducer_.reduce(*group);
  if (host_ != nullptr && last_) host_->follow(*group);
  reduced_[static_cast<std::size_t>(group->id)] = true;
}

bool ReduceTurns::end() {
  if (!open_) return false;
  while (next_ < order_.size()) reduce_next();
  if (owed_ || any_reduced()) reducer_.finish();
  const bool whole = owed_ && last_;
  if (host_ != nullptr && whole) {
    host_->finish();
    reducer_.cleared();
  } else if (host_ != nullptr) {
    host_->stay();
  }
  open_ = false;
  owed_ = false;
  return whole;
}

}  // namespace fsdpp::runtime
