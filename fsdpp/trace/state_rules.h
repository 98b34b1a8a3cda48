#pragma once

#include <map>
#include <string>

#include "fsdpp/device/operation.h"

namespace fsdpp::trace {

/// The states of one rank's units and slots, followed move by move.
class StateRules {
 public:
  /// Takes a move; returns what is wrong with it, empty when it is allowed and begins where the last one
  /// ended.
  [[nodiscard]] std::string move(const std::string& name, device::State from, device::State to);

 private:
  std::map<std::string, device::State> states_;
};

/// The table: a unit is gathered, becomes resident, may be gathered anew with newer weights, and is released;
/// a slot is opened, reduced (a slot without contributions too) and closed, or closed without when its
/// backward raised.
[[nodiscard]] bool allowed(device::State from, device::State to) noexcept;

}  // namespace fsdpp::trace
