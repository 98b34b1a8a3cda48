#pragma once

#include "fsdpp/device/device.h"

namespace fsdpp::device {

/// Runs every operation at once, in the calling thread: all lanes are one.
class HostDevice final : public Device {
 public:
  [[nodiscard]] bool runs_inline() const noexcept override { return true; }

 protected:
  void submit(const Operation& operation, Work work) override;
};

}  // namespace fsdpp::device
