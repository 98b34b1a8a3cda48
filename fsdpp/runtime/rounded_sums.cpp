#include "fsdpp/runtime/rounded_sums.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace fsdpp::runtime {
namespace {

using device::LaneKind;
constexpr auto kSumBytes = static_cast<int64_t>(sizeof(float));

}  // namespace

RoundedSums::RoundedSums(Peers& peers, const std::vector<ParameterGroup*>& groups,
                         std::shared_ptr<device::Ledger> ledger)
    : peers_(peers) {
  int64_t largest = 0;
  for (const ParameterGroup* group : groups) {
    if (group->rounds_sums()) largest = std::max(largest, group->layout->shard_numel() * kSumBytes);
  }
  if (largest == 0) return;
  memory_ = peers_.device().allocate(static_cast<std::size_t>(largest), "sums before they are rounded",
                                     std::move(ledger));
}

std::vector<buffer::ReduceTarget> RoundedSums::targets(const ParameterGroup& group) const {
  return buffer::whole_shard(*group.layout, peers_.rank(), memory_.data());
}

void RoundedSums::store(const ParameterGroup& group, std::span<const buffer::ReduceTarget> outputs) {
  const auto element = static_cast<int64_t>(c10::elementSize(group.gradient_dtype));
  for (const buffer::ReduceTarget& output : outputs) {
    const layout::Segment& segment = output.segment;
    const Elements sum{memory_.data() + segment.shard_offset * kSumBytes, at::kFloat, group.place};
    const Elements stored{static_cast<std::byte*>(output.out), group.gradient_dtype, group.place};
    device::Access access{{bytes_at(sum.data, segment.count * kSumBytes)},
                          {bytes_at(stored.data, segment.count * element)}};
    if (output.add) access.reads.push_back(bytes_at(stored.data, segment.count * element));
    peers_.device().run(LaneKind::reduce, "round " + group.name, std::move(access),
                        [=, add = output.add, count = segment.count] {
                          const at::NoGradGuard no_grad;
                          if (add) {
                            stored.tensor(count).add_(sum.tensor(count));
                          } else {
                            cast_elements(sum, count, stored);
                          }
                        });
  }
}

}  // namespace fsdpp::runtime
