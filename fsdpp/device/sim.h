#pragma once

#include <deque>
#include <functional>
#include <utility>

#include "fsdpp/device/device.h"
#include "fsdpp/device/sim_world.h"

namespace fsdpp::device {

/// Lanes whose operations run later, in an order that a SimWorld chooses: what a device may do, made to
/// happen. Memory that ends its life is filled with NaNs. For ranks that are threads of one process, and for
/// models that compute inside run() alone: what libtorch computes by itself on the host is not deferred.
class SimDevice final : public Device {
 public:
  /// `world` outlives it. Made by the thread of `rank` after it has entered the world.
  SimDevice(SimWorld& world, int rank);
  /// What has not run never will.
  ~SimDevice() override;

  /// Operations that have no effect: for tests of what happens without them.
  std::function<bool(const Operation&)> dropped;

  [[nodiscard]] Memory allocate(std::size_t bytes, std::string purpose,
                                std::shared_ptr<Ledger> ledger) override;
  /// The host waits while it is more units ahead than the seed allows.
  void stay_near() override;

 protected:
  void submit(const Operation& operation, Work work) override;

 private:
  SimWorld& world_;
  SimLanes lanes_;
  uint64_t given_ = 0;          // position of the compute lane's last operation
  std::deque<uint64_t> ahead_;  // the same at the begin of each unit that the host is ahead of
};

}  // namespace fsdpp::device
