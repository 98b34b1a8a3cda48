#include "fsdpp/runtime/slot_memory.h"

#include <algorithm>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/device/sanitizer.h"

namespace fsdpp::runtime {
namespace {

using device::LaneKind;
constexpr const char* kSlots = "gradient slots";

}  // namespace

SlotMemory::SlotMemory(Peers& peers, std::vector<ParameterGroup*> groups, layout::ArenaPlan plan,
                       std::shared_ptr<device::Ledger> ledger)
    : peers_(peers), groups_(std::move(groups)), plan_(std::move(plan)), ledger_(std::move(ledger)) {
  alive_.resize(groups_.size());
  states_.resize(groups_.size(), device::State::closed);
  allocate();
}

SlotMemory::~SlotMemory() {
  if (memory_) {
    device::unpoison(memory_->peer(peers_.rank()), memory_->bytes());
    ledger_->remove(kSlots, allocated_);
  }
}

void SlotMemory::replan(layout::ArenaPlan plan) {
  plan_ = std::move(plan);
  if (plan_.bytes() > allocated_) {
    if (memory_) {
      peers_.device().wait(LaneKind::host, peers_.device().record(LaneKind::gather));  // see retire_all
      peers_.device().free(LaneKind::host, kSlots, {memory_->peer(peers_.rank()), memory_->bytes()});
      memory_.reset();
      ledger_->remove(kSlots, allocated_);
    }
    allocate();
  }
}

void SlotMemory::allocate() {
  allocated_ = plan_.bytes();
  if (allocated_ == 0) return;
  memory_ = peers_.allocate(static_cast<std::size_t>(allocated_), kSlots);
  ledger_->add(kSlots, allocated_);
  retire_all();
}

void SlotMemory::end_life(LaneKind lane, int slot) {
  const auto index = static_cast<std::size_t>(slot);
  if (alive_[index]) peers_.device().release(lane, "slot " + group(slot).name, range(slot));
  alive_[index] = false;
}

void SlotMemory::begin_life(int slot) {
  for (int other = 0; other < slots(); ++other) {
    if (other == slot || plan_.share_bytes(slot, other)) end_life(LaneKind::compute, other);
  }
  peers_.device().acquire(LaneKind::compute, "slot " + group(slot).name, range(slot));
  alive_[static_cast<std::size_t>(slot)] = true;
}

void SlotMemory::move(int slot, device::State to) {
  device::State& state = states_[static_cast<std::size_t>(slot)];
  peers_.device().move("slot " + group(slot).name, std::exchange(state, to), to);
}

void SlotMemory::retire_all() {
  for (int slot = 0; slot < slots(); ++slot) end_life(LaneKind::gather, slot);
  // Lanes that run later poison in their own order: each slot when it is released.
  if (memory_ && peers_.device().runs_inline())
    device::poison(memory_->peer(peers_.rank()), memory_->bytes());
}

int SlotMemory::slot_of(const ParameterGroup& group) const {
  const auto found = std::find(groups_.begin(), groups_.end(), &group);
  FSDPP_INVARIANT(found != groups_.end(), "group ", group.name, " has no gradient slot");
  return static_cast<int>(found - groups_.begin());
}

std::vector<Sized> SlotMemory::sizes() const {
  std::vector<Sized> result;
  for (const ParameterGroup* group : groups_) result.push_back({group->name, group->slot_bytes()});
  return result;
}

ByteRange SlotMemory::range(int slot) const {
  return {data(slot), static_cast<std::size_t>(group(slot).slot_bytes())};
}

buffer::ShardedBuffer SlotMemory::buffer(int slot, layout::Placement placement) const {
  const ParameterGroup& owner = group(slot);
  std::vector<std::byte*> parts;
  for (int rank = 0; rank < peers_.ranks(); ++rank) {
    const bool addressable = memory_->peer(rank) != nullptr;
    parts.push_back(addressable ? data(slot, rank) : nullptr);
  }
  return {owner.name, owner.layout, placement, peers_.rank(), element_of(owner.wire), std::move(parts)};
}

at::Tensor SlotMemory::gradient(int slot, const Parameter& parameter) const {
  return gradient_view(memory_, data(slot), parameter);
}

at::Tensor SlotMemory::over(int slot, std::byte* data, at::IntArrayRef sizes) const {
  const ParameterGroup& owner = group(slot);
  return tensor_over(memory_, data, sizes, at::TensorOptions(owner.place).dtype(owner.wire));
}

at::Tensor gradient_view(std::shared_ptr<void> owner, std::byte* base, const Parameter& parameter) {
  const ParameterGroup& group = *parameter.group;
  const auto element = static_cast<int64_t>(c10::elementSize(group.wire));
  return tensor_over(std::move(owner), base + group.layout->parameter_offset(parameter.index) * element,
                     parameter.sizes, at::TensorOptions(group.place).dtype(group.wire));
}

void zero_missing(device::Device& device, const ParameterGroup& group, std::byte* base) {
  for (const auto& parameter : group.parameters) {
    if (parameter->contributed || !parameter->late.empty()) continue;
    const auto element = static_cast<int64_t>(c10::elementSize(group.wire));
    device.fill(device::LaneKind::compute, "zero " + parameter->name,
                base + group.layout->parameter_offset(parameter->index) * element, 0,
                static_cast<std::size_t>(group.layout->parameter_numel(parameter->index) * element));
  }
}

}  // namespace fsdpp::runtime
