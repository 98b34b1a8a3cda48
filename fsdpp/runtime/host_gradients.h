#pragma once

#include <map>
#include <memory>
#include <vector>

#include "fsdpp/device/device.h"
#include "fsdpp/runtime/parameter_group.h"

namespace fsdpp::runtime {

/// With Options::offload: brings a window's reduced gradients down to host memory, where the shards' main
/// weights are. Until a window's last backward gradients stay where the lanes run; then each group's are
/// copied down behind the next group's reduce, on the reduce lane.
class HostGradients {
 public:
  /// `groups`: the trainable ones. `early`: a group's gradient is complete when the next group has been
  /// reduced (else not before the end).
  HostGradients(device::Device& device, const std::vector<ParameterGroup*>& groups, bool early,
                std::shared_ptr<device::Ledger> ledger);

  /// A round of reduces begins: gradients in host memory make room for those of the lanes; what is not
  /// cleared by then is added in the end.
  void begin();
  /// The shards' gradients were cleared, those too that made room.
  void cleared() { kept_.clear(); }
  /// The window's last reduce of `group` has been launched.
  void follow(ParameterGroup& group);
  /// The window's gradients are complete: they are in host memory, and the shards' `.grad`, when it returns.
  void finish();
  /// The round is over, but not its window: what made room, and got nothing new, shows again.
  void stay();

 private:
  struct Host {
    device::Memory memory;
    bool copied = false;
  };

  // A gradient on the lanes as the last round left it.
  struct OnTheLanes {
    const void* data;
    int64_t version;
  };

  void copy(ParameterGroup& group);
  void make_room(const Parameter& parameter);
  [[nodiscard]] at::Tensor place_of(const Parameter& parameter) const;

  device::Device& device_;
  bool early_;
  std::map<ParameterGroup*, Host> groups_;
  std::map<const Parameter*, at::Tensor> kept_;          // host gradients that were not cleared
  std::map<const Parameter*, OnTheLanes> on_the_lanes_;  // partial sums of the window
  ParameterGroup* last_ = nullptr;                       // launched, and perhaps not complete
};

}  // namespace fsdpp::runtime
