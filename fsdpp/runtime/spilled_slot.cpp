#include "fsdpp/runtime/spilled_slot.h"

#include <utility>

#include "fsdpp/base/error.h"

namespace fsdpp::runtime {

using device::LaneKind;

void SpilledSlot::take(device::Device& device, const ParameterGroup& group,
                       std::shared_ptr<device::Ledger> ledger) {
  try {
    memory_ = device.allocate(static_cast<std::size_t>(group.slot_bytes()), "gradients beside the plan",
                              std::move(ledger));
  } catch (const NoRoomError& error) {
    throw NoRoomError(
        text(error.what(), ". It is for the gradient of ", group.name,
             ", whose slot's bytes another one needs before it is reduced: slots are planned for the "
             "order in which gradients became complete; let that (of backward_dw() too) be the same in "
             "every step, then none goes beside the plan"));
  }
  device.acquire(LaneKind::compute, "spilled " + group.name, {memory_.data(), memory_.bytes()});
}

void SpilledSlot::drop(device::Device& device, const ParameterGroup& group) {
  if (empty()) return;
  device.wait(LaneKind::host, device.record(LaneKind::compute));
  device.free(LaneKind::host, "spilled " + group.name, {memory_.data(), memory_.bytes()});
  memory_ = {};
}

}  // namespace fsdpp::runtime
