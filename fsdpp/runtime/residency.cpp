#include "fsdpp/runtime/residency.h"

#include <algorithm>
#include <utility>

#include "fsdpp/base/bytes.h"
#include "fsdpp/runtime/inner_shards.h"

namespace fsdpp::runtime {

using device::LaneKind;

Residency::Residency(Peers& peers, Publisher& publisher, std::vector<std::vector<ParameterGroup*>> units,
                     std::vector<Sized> sizes, std::optional<int64_t> prefetch_bytes, layout::ArenaPlan plan,
                     std::shared_ptr<device::Ledger> ledger)
    : peers_(peers),
      publisher_(publisher),
      sizes_(std::move(sizes)),
      prefetch_bytes_(prefetch_bytes),
      arena_(peers.device(), std::move(plan), std::move(ledger)) {
  for (auto& groups : units) entries_.push_back({.groups = std::move(groups)});
}

void Residency::hold(int unit, Hold kind) {
  Entry& entry = entries_.at(static_cast<std::size_t>(unit));
  ++entry.holds[static_cast<std::size_t>(kind)];
  if (entry.memory == nullptr || entry.epoch != publisher_.epoch()) gather(unit);
  if (kind != Hold::prefetch) await(unit);
}

void Residency::drop(int unit, Hold kind) {
  Entry& entry = entries_.at(static_cast<std::size_t>(unit));
  int& count = entry.holds[static_cast<std::size_t>(kind)];
  if (count > 0) --count;
  const bool held = std::any_of(entry.holds.begin(), entry.holds.end(), [](int holds) { return holds > 0; });
  if (!held && entry.memory != nullptr) release(unit);
}

void Residency::drop_all(int unit, Hold kind) {
  Entry& entry = entries_.at(static_cast<std::size_t>(unit));
  int& count = entry.holds[static_cast<std::size_t>(kind)];
  count = std::min(count, 1);
  drop(unit, kind);
}

void Residency::drop_all(Hold kind) {
  for (int unit = 0; unit < static_cast<int>(entries_.size()); ++unit) drop_all(unit, kind);
}

void Residency::prefetch(const Order& order) {
  const std::span<const Visit> ahead = order.ahead();
  for (const Visit& visit : ahead.first(prefetched(ahead, sizes_, prefetch_bytes_))) {
    if (!resident(visit.unit)) hold(visit.unit, Hold::prefetch);
  }
}

void Residency::renew() {
  for (int unit = 0; unit < static_cast<int>(entries_.size()); ++unit) {
    const Entry& entry = entries_[static_cast<std::size_t>(unit)];
    if (entry.memory != nullptr && stays(entry) && entry.epoch != publisher_.epoch()) {
      gather(unit);
      await(unit);
    }
  }
}

int Residency::holds(int unit, Hold kind) const {
  return entries_.at(static_cast<std::size_t>(unit)).holds[static_cast<std::size_t>(kind)];
}

bool Residency::at_rest() const noexcept {
  return std::all_of(entries_.begin(), entries_.end(),
                     [](const Entry& entry) { return entry.memory == nullptr; });
}

void Residency::gather(int unit) {
  Entry& entry = entries_[static_cast<std::size_t>(unit)];
  if (entry.groups.empty()) return;
  move(unit, device::State::gathering);
  const bool still_there = stays(entry) && entry.epoch == publisher_.epoch();
  if (!still_there) {
    ++gathers_;
    take_memory(unit);
  }
  if (stays(entry)) entry.memory = entry.groups.front()->own_place;
  std::byte* place = entry.memory;
  for (ParameterGroup* group : entry.groups) {
    std::byte* full = stays(entry) ? group->own_place : place;
    if (!still_there) fetch(*group, full);
    group->attach(full);
    place += round_up(group->full_bytes(), kAlignment);
  }
  entry.epoch = publisher_.epoch();
  if (!still_there) entry.gathered = peers_.device().record(LaneKind::gather);
  entry.awaited = false;
}

void Residency::fetch(const ParameterGroup& group, std::byte* full) {
  if (group.inner != nullptr && group.inner->gather(group, full, publisher_.epoch())) return;
  publisher_.gather(group, full);
  keep(group, full);
}

bool Residency::keeps(const ParameterGroup& group) const {
  return keeping_ && group.inner != nullptr && !group.inner->kept(group, publisher_.epoch());
}

void Residency::keep(const ParameterGroup& group, const std::byte* full) {
  if (keeps(group)) group.inner->keep(group, full, publisher_.epoch());
}

void Residency::complete_parts() {
  if (!keeping_) return;
  bool left_out = false;
  for (int unit = 0; unit < static_cast<int>(entries_.size()); ++unit) {
    for (const ParameterGroup* group : entries_[static_cast<std::size_t>(unit)].groups) {
      if (!keeps(*group)) continue;
      left_out = true;
      publisher_.await(LaneKind::gather, *group);
      if (group->inner->keep_published(*group, publisher_.epoch())) continue;
      hold(unit, Hold::parts);  // keeps, unless it was here before the training began
      keep(*group, static_cast<const std::byte*>(group->real.data()));
      drop(unit, Hold::parts);
    }
  }
  for (const Entry& entry : entries_) {
    for (const ParameterGroup* group : entry.groups) {
      if (group->inner != nullptr) group->inner->complete(publisher_.epoch());
    }
  }
  keeping_ = false;
  // Perhaps no gather follows that the compute lane will wait for, and no lane may be left behind.
  if (left_out) peers_.device().wait(LaneKind::compute, peers_.device().record(LaneKind::gather));
}

// The gather lane may write the unit's memory from here on.
void Residency::take_memory(int unit) {
  Entry& entry = entries_[static_cast<std::size_t>(unit)];
  if (entry.memory != nullptr) {  // older weights are in place: their readers on the compute lane come first
    peers_.device().wait(LaneKind::gather, peers_.device().record(LaneKind::compute));
  } else if (!stays(entry)) {  // else: the publication waited for the readers of what it made old
    entry.memory = arena_.acquire(unit);
  }
}

// The compute lane waits when it is about to use the weights, not while they are prefetched under other work.
void Residency::await(int unit) {
  Entry& entry = entries_[static_cast<std::size_t>(unit)];
  if (entry.memory == nullptr || entry.awaited) return;
  peers_.device().wait(LaneKind::compute, entry.gathered);
  entry.awaited = true;
  move(unit, device::State::resident);
}

void Residency::release(int unit) {
  Entry& entry = entries_[static_cast<std::size_t>(unit)];
  await(unit);  // a prefetch that nobody used may still be under way
  announce_use(peers_.device(), "done with", entry.groups);
  for (ParameterGroup* group : entry.groups) group->detach();
  if (!stays(entry)) arena_.release(unit);
  entry.memory = nullptr;
  move(unit, device::State::released);
}

void Residency::move(int unit, device::State to) {
  Entry& entry = entries_[static_cast<std::size_t>(unit)];
  peers_.device().move("unit " + arena_.plan().buffers()[static_cast<std::size_t>(unit)].name, entry.state,
                       to);
  entry.state = to;
}

}  // namespace fsdpp::runtime
