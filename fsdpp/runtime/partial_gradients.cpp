#include "fsdpp/runtime/partial_gradients.h"

#include <utility>
#include <vector>

#include "fsdpp/base/error.h"

namespace fsdpp::runtime {
namespace {

bool is_zero(const at::Tensor& gradient) { return gradient.count_nonzero().item<int64_t>() == 0; }

}  // namespace

bool PartialGradients::replaced(const Parameter& parameter, const State& state) {
  const at::Tensor& gradient = parameter.shard.grad();
  return gradient.numel() > 0 && gradient.const_data_ptr() != state.shown.const_data_ptr();
}

bool PartialGradients::holds(Parameter& parameter) {
  State& state = states_[&parameter];
  if (!state.open) return false;
  const at::Tensor& gradient = parameter.shard.grad();
  if (!gradient.defined()) {  // set_to_none
    state = {};
  } else if (replaced(parameter, state)) {
    take_over(parameter, state);
  } else if (gradient._version() != state.version && shows_all_) {
    state.version = gradient._version();
    if (is_zero(gradient)) state.aside.reset();
  } else if (gradient._version() != state.version) {
    close_zeroed();
  }
  return state.open;
}

// Somebody wrote gradients of which this rank holds more than they show. To set all to zero is zero_grad; a
// part that was zero anyway does not tell that from a factor, the other parameters' do.
void PartialGradients::close_zeroed() {
  std::vector<Parameter*> zeroed;
  for (auto& [parameter, state] : states_) {
    const at::Tensor& gradient = parameter->shard.grad();
    if (!state.open || !gradient.defined() || gradient._version() == state.version) continue;
    require(is_zero(gradient), "the gradient of ", parameter->name,
            " was changed between a window's backwards: under this strategy it is this rank's part of a sum "
            "that is not complete; change it after the window's last backward, or clear it with zero_grad()");
    zeroed.push_back(parameter);
  }
  for (Parameter* parameter : zeroed) {
    states_[parameter] = {};
    parameter->shard.mutable_grad().reset();
  }
}

void PartialGradients::drop_refused(Parameter& parameter) {
  State& state = states_[&parameter];
  at::Tensor& gradient = parameter.shard.mutable_grad();
  if (shows_all_ || !state.open || !gradient.defined()) return;
  if (!replaced(parameter, state) && gradient._version() == state.version) return;
  state = {};
  gradient.reset();
}

// The user put a tensor of his own in the place of what was accumulated: that is what counts from here on.
void PartialGradients::take_over(Parameter& parameter, State& state) {
  at::Tensor& gradient = parameter.shard.mutable_grad();
  require(
      shows_all_, "the gradient of ", parameter.name,
      " was replaced between a window's backwards: under this strategy it is this rank's part of a sum that "
      "is not complete; replace it after the window's last backward, or clear it with zero_grad()");
  require(gradient.sizes() == state.shown.sizes(), "the gradient of ", parameter.name,
          " was replaced by one of sizes ", gradient.sizes(), "; expected ", state.shown.sizes());
  const at::NoGradGuard no_grad;
  state.shown.copy_(gradient);
  state.version = state.shown._version();
  gradient = state.shown;
}

void PartialGradients::move_out(Parameter& parameter) {
  at::Tensor& gradient = parameter.shard.mutable_grad();
  if (gradient.defined()) gradient = gradient.detach().clone();
}

void PartialGradients::open(Parameter& parameter, at::Tensor shown) {
  State& state = states_[&parameter];
  at::Tensor& gradient = parameter.shard.mutable_grad();
  state = {true, shown, shown._version(), std::move(gradient)};
  gradient = std::move(shown);
}

void PartialGradients::take_back(Parameter& parameter) {
  State& state = states_[&parameter];
  if (!state.open) return;
  parameter.shard.mutable_grad() = state.aside;
  state = {};
}

void PartialGradients::close(Parameter& parameter) {
  State state = std::exchange(states_[&parameter], {});
  at::Tensor& gradient = parameter.shard.mutable_grad();
  if (!gradient.defined() || !state.aside.defined()) return;
  const bool cleared = gradient._version() != state.version && is_zero(gradient);
  if (!cleared) gradient.add_(state.aside);
}

const Parameter* PartialGradients::any() const {
  for (const auto& [parameter, state] : states_) {
    const at::Tensor& gradient = parameter->shard.grad();
    if (!state.open || !gradient.defined()) continue;
    const bool cleared = gradient._version() != state.version && is_zero(gradient);
    if (!cleared) return parameter;
  }
  return nullptr;
}

}  // namespace fsdpp::runtime
