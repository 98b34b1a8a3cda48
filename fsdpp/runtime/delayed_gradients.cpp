#include "fsdpp/runtime/delayed_gradients.h"

#include <algorithm>
#include <utility>

#include "fsdpp/runtime/parameter_group.h"

namespace fsdpp::runtime {

void DelayedGradients::begin() {
  for (std::size_t unit = 0; unit < entries_.size(); ++unit) before_[unit] = entries_[unit].size();
}

void DelayedGradients::add(Parameter& parameter, RowWriter write, bool by_rows) {
  entries_[static_cast<std::size_t>(parameter.group->unit)].push_back(
      {&parameter, std::move(write), by_rows});
}

void DelayedGradients::forget_last() {
  for (std::size_t unit = 0; unit < entries_.size(); ++unit) {
    auto& waiting = entries_[unit];
    waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(std::min(before_[unit], waiting.size())),
                  waiting.end());
  }
}

std::vector<DelayedGradients::Entry> DelayedGradients::take(int unit) {
  before_[static_cast<std::size_t>(unit)] = 0;
  return std::exchange(entries_[static_cast<std::size_t>(unit)], {});
}

bool DelayedGradients::any() const noexcept {
  return std::any_of(entries_.begin(), entries_.end(), [](const auto& unit) { return !unit.empty(); });
}

RowWriter writer_of(const at::Tensor& gradient) {
  return [gradient](const GradSink& sink, int64_t, int64_t) {
    if (sink.mode == GradSink::Mode::add) {
      sink.view.add_(gradient);
    } else {
      sink.view.copy_(gradient);
    }
  };
}

}  // namespace fsdpp::runtime
