#include "fsdpp/runtime/plan.h"

#include <algorithm>

#include "fsdpp/device/sanitizer.h"

namespace fsdpp::runtime {

std::vector<Visit> structural_visits(std::span<const int> order) {
  std::vector<Visit> visits;
  const int last = static_cast<int>(order.size()) - 1;
  for (int step = 0; step <= last; ++step) {
    const int unit = order[static_cast<std::size_t>(step)];
    visits.push_back({unit, step, unit == 0 ? last : step});
  }
  return visits;
}

std::size_t prefetched(std::span<const Visit> ahead, std::span<const Sized> units,
                       std::optional<int64_t> budget) {
  if (!budget) {
    const auto next = std::find_if(ahead.begin(), ahead.end(), [&](const Visit& visit) {
      return !units[static_cast<std::size_t>(visit.unit)].here;
    });
    return static_cast<std::size_t>(next - ahead.begin()) + (next != ahead.end() ? 1 : 0);
  }
  int64_t bytes = 0;
  std::size_t count = 0;
  for (const Visit& visit : ahead) {
    bytes += units[static_cast<std::size_t>(visit.unit)].bytes;
    if (bytes > *budget) break;
    ++count;
  }
  return count;
}

layout::ArenaPlan plan_weights(std::span<const Sized> units, std::span<const std::vector<Visit>> orders,
                               std::optional<int64_t> budget) {
  std::vector<layout::PlannedBuffer> buffers;
  for (const Sized& unit : units) buffers.push_back({unit.name, unit.bytes + device::kRedZone, {}});
  int64_t start = 0;  // of the pass on a time line on which passes follow one another
  for (const std::vector<Visit>& order : orders) {
    // The step at which each visit's gather is launched.
    std::vector<int64_t> launched(order.size());
    for (std::size_t step = 0; step < order.size(); ++step) launched[step] = static_cast<int64_t>(step);
    for (std::size_t step = order.size(); step-- > 0;) {
      const auto ahead = std::span(order).subspan(step + 1);
      for (std::size_t next = 1; next <= prefetched(ahead, units, budget); ++next)
        launched[step + next] = static_cast<int64_t>(step);
    }
    for (std::size_t step = 0; step < order.size(); ++step) {
      const Visit& visit = order[step];
      buffers[static_cast<std::size_t>(visit.unit)].lifetimes.push_back(
          {start + launched[step], start + visit.left});
    }
    start += static_cast<int64_t>(order.size());
  }
  return layout::ArenaPlan::build(std::move(buffers));
}

layout::ArenaPlan plan_slots(std::span<const Sized> slots, std::span<const SlotUse> uses) {
  std::vector<layout::PlannedBuffer> buffers;
  for (const Sized& slot : slots) buffers.push_back({slot.name, slot.bytes + device::kRedZone, {}});
  for (std::size_t position = 0; position < uses.size(); ++position) {
    const auto turn = static_cast<int64_t>(position);
    const int64_t opened = std::min<int64_t>(uses[position].opened, turn);
    buffers[static_cast<std::size_t>(uses[position].slot)].lifetimes.push_back({opened, turn + 1});
  }
  return layout::ArenaPlan::build(std::move(buffers));
}

}  // namespace fsdpp::runtime
