#include "fsdpp/runtime/weight_arena.h"

#include <algorithm>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/device/sanitizer.h"

namespace fsdpp::runtime {
namespace {

using device::LaneKind;
constexpr const char* kFullWeights = "full weights";

}  // namespace

WeightArena::WeightArena(device::Device& device, layout::ArenaPlan plan,
                         std::shared_ptr<device::Ledger> ledger)
    : device_(device), ledger_(std::move(ledger)) {
  replan(std::move(plan));
}

void WeightArena::replan(layout::ArenaPlan plan) {
  for (const Place& place : places_) FSDPP_INVARIANT(!place.held, "replanning while a unit is gathered");
  if (!places_.empty() && plan.same_places(plan_)) return;
  device_.synchronize();  // the places' last readers may still run
  plan_ = std::move(plan);
  if (static_cast<int64_t>(arena_.bytes()) != plan_.bytes()) {
    device_.free(LaneKind::host, kFullWeights, {arena_.data(), arena_.bytes()});
    arena_ = {};  // first, so that the two are never held together
    arena_ = device_.allocate(static_cast<std::size_t>(plan_.bytes()), kFullWeights, ledger_);
  }
  device::poison(arena_.data(), arena_.bytes());
  places_.clear();
  places_.resize(plan_.buffers().size());
}

std::size_t WeightArena::bytes_of(int unit) const {
  return static_cast<std::size_t>(plan_.buffers()[static_cast<std::size_t>(unit)].bytes - device::kRedZone);
}

std::string WeightArena::name_of(int unit) const {
  return "weights of " + plan_.buffers()[static_cast<std::size_t>(unit)].name;
}

std::byte* WeightArena::acquire(int unit) {
  Place& place = places_.at(static_cast<std::size_t>(unit));
  FSDPP_INVARIANT(!place.held, "unit ", unit, " already holds memory");
  place.held = true;
  const std::size_t bytes = bytes_of(unit);
  bool taken = false;
  for (int other = 0; other < static_cast<int>(places_.size()); ++other) {
    const Place& neighbour = places_[static_cast<std::size_t>(other)];
    if (other == unit || !plan_.share_bytes(unit, other)) continue;
    if (neighbour.held && neighbour.overflow.data() == nullptr) taken = true;
    device_.wait(LaneKind::gather, neighbour.last_use);
  }
  if (taken) {
    ++overflows_;
    place.overflow = device_.allocate(bytes, "full weights beside the plan", ledger_);
    device_.acquire(LaneKind::gather, name_of(unit), {place.overflow.data(), bytes});
    return place.overflow.data();
  }
  device_.wait(LaneKind::gather, place.last_use);
  std::byte* memory = arena_.data() + plan_.offset(unit);
  device_.acquire(LaneKind::gather, name_of(unit), {memory, bytes});
  return memory;
}

void WeightArena::release(int unit) {
  Place& place = places_.at(static_cast<std::size_t>(unit));
  FSDPP_INVARIANT(place.held, "unit ", unit, " holds no memory");
  place.held = false;
  if (place.overflow.data() != nullptr) {
    const ByteRange range{place.overflow.data(), place.overflow.bytes()};
    device_.release(LaneKind::compute, name_of(unit), range);
    device_.wait(LaneKind::host, device_.record(LaneKind::compute));
    device_.free(LaneKind::host, name_of(unit), range);
    place.overflow = {};
    return;
  }
  const std::size_t bytes = bytes_of(unit);
  device_.release(LaneKind::compute, name_of(unit), {arena_.data() + plan_.offset(unit), bytes});
  place.last_use = device_.record(LaneKind::compute);
}

}  // namespace fsdpp::runtime
