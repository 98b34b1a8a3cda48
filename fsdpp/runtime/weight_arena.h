#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdpp/device/device.h"
#include "fsdpp/device/memory.h"
#include "fsdpp/layout/arena_plan.h"

namespace fsdpp::runtime {

/// Memory for full weights: one arena with planned offsets. A unit whose planned place is taken (the step
/// departs from the plan) gets ordinary memory instead, so a departure is never wrong.
class WeightArena {
 public:
  WeightArena(device::Device& device, layout::ArenaPlan plan, std::shared_ptr<device::Ledger> ledger);

  /// Memory for `unit`, which must hold none. The gather lane may write it: it waits for the place's last
  /// reader.
  [[nodiscard]] std::byte* acquire(int unit);
  /// Gives it back, after what the compute lane has been given so far.
  void release(int unit);

  /// Takes over another plan. No unit may hold memory.
  void replan(layout::ArenaPlan plan);

  [[nodiscard]] const layout::ArenaPlan& plan() const noexcept { return plan_; }
  [[nodiscard]] int64_t overflows() const noexcept { return overflows_; }  // units that got ordinary memory

 private:
  struct Place {
    bool held = false;
    device::Memory overflow;  // when the planned place was taken
    device::Event last_use;   // on the compute lane
  };

  [[nodiscard]] std::size_t bytes_of(int unit) const;
  [[nodiscard]] std::string name_of(int unit) const;

  device::Device& device_;
  layout::ArenaPlan plan_;
  std::shared_ptr<device::Ledger> ledger_;
  device::Memory arena_;
  std::vector<Place> places_;
  int64_t overflows_ = 0;
};

}  // namespace fsdpp::runtime
