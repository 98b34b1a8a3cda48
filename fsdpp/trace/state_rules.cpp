#include "fsdpp/trace/state_rules.h"

#include <utility>

#include "fsdpp/base/error.h"

namespace fsdpp::trace {

bool allowed(device::State from, device::State to) noexcept {
  using device::State;
  switch (from) {
    case State::released:
      return to == State::gathering;
    case State::gathering:
      return to == State::resident || to == State::gathering;
    case State::resident:
      return to == State::released || to == State::gathering;
    case State::closed:
      return to == State::open || to == State::reducing;
    case State::open:
      return to == State::reducing || to == State::closed;
    case State::reducing:
      return to == State::closed;
  }
  return false;
}

std::string StateRules::move(const std::string& name, device::State from, device::State to) {
  const auto [entry, is_new] = states_.try_emplace(name, from);
  const device::State was = std::exchange(entry->second, to);
  if (was != from) {
    return text("leaves the state ", device::to_string(from), " but is in the state ",
                device::to_string(was));
  }
  if (!allowed(from, to)) {
    return text("goes from ", device::to_string(from), " to ", device::to_string(to),
                ", which is not allowed");
  }
  return {};
}

}  // namespace fsdpp::trace
