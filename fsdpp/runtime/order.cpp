#include "fsdpp/runtime/order.h"

#include <algorithm>
#include <tuple>

namespace fsdpp::runtime {

void Order::begin() {
  recorded_.clear();
  next_ = 0;
}

int Order::arrive(int unit) {
  const int step = static_cast<int>(recorded_.size());
  recorded_.push_back({unit, step, step});
  if (next_ >= expected_.size() || expected_[next_].unit != unit) {
    ++departures_;
    const auto found =
        std::find_if(expected_.begin() + static_cast<std::ptrdiff_t>(std::min(next_, expected_.size())),
                     expected_.end(), [&](const Visit& visit) { return visit.unit == unit; });
    if (found == expected_.end()) return next_ < expected_.size() ? expected_[next_].unit : -1;
    next_ = static_cast<std::size_t>(found - expected_.begin());
  }
  ++next_;
  return next_ < expected_.size() ? expected_[next_].unit : -1;
}

void Order::leave(int unit) {
  const int step = static_cast<int>(recorded_.size()) - 1;
  for (auto visit = recorded_.rbegin(); visit != recorded_.rend(); ++visit) {
    if (visit->unit == unit) {
      visit->left = step;
      return;
    }
  }
}

bool Order::complete() {
  const auto key = [](const Visit& visit) { return std::tuple(visit.unit, visit.arrived, visit.left); };
  const bool same = std::equal(recorded_.begin(), recorded_.end(), expected_.begin(), expected_.end(),
                               [&](const Visit& a, const Visit& b) { return key(a) == key(b); });
  if (!same) expected_ = recorded_;
  return !same;
}

}  // namespace fsdpp::runtime
