#pragma once

#include <cstddef>
#include <memory>

#include "fsdpp/device/device.h"
#include "fsdpp/runtime/parameter_group.h"

namespace fsdpp::runtime {

/// Ordinary memory for a group's gradient whose planned bytes are those of another open slot: its backward
/// departs from the order for which slots were planned.
class SpilledSlot {
 public:
  [[nodiscard]] bool empty() const noexcept { return memory_.data() == nullptr; }
  /// Of group.slot_bytes() bytes; nullptr when empty.
  [[nodiscard]] std::byte* data() const noexcept { return memory_.data(); }

  /// The compute lane may write it from here on. Throws NoRoomError that says how to do without it.
  void take(device::Device& device, const ParameterGroup& group, std::shared_ptr<device::Ledger> ledger);
  /// Empty once the compute lane has run what it was given.
  void drop(device::Device& device, const ParameterGroup& group);

 private:
  device::Memory memory_;
};

}  // namespace fsdpp::runtime
