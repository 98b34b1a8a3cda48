#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/buffer/sharded_buffer.h"
#include "fsdpp/device/ledger.h"
#include "fsdpp/layout/arena_plan.h"
#include "fsdpp/runtime/parameter_group.h"
#include "fsdpp/runtime/peers.h"
#include "fsdpp/runtime/plan.h"

namespace fsdpp::runtime {

/// Peer memory with one gradient slot per trainable group at a planned offset, equal on all ranks: the whole
/// group in its wire dtype, the reduce's input.
class SlotMemory {
 public:
  /// Collective. `groups`: the trainable groups; slot i of `plan` is groups[i]'s.
  SlotMemory(Peers& peers, std::vector<ParameterGroup*> groups, layout::ArenaPlan plan,
             std::shared_ptr<device::Ledger> ledger);
  ~SlotMemory();

  /// Collective: takes over another plan; grows the memory when it needs more. No slot may be in use on any
  /// rank.
  void replan(layout::ArenaPlan plan);

  /// The compute lane may write `slot` from here on: lives of slots on its bytes end, its own begins.
  void begin_life(int slot);
  /// Says where `slot` stands from now on.
  void move(int slot, device::State to);
  /// No slot holds values any more, here or for a peer, after what the gather lane has been given: until a
  /// life begins, its use is reported.
  void retire_all();

  [[nodiscard]] int slots() const noexcept { return static_cast<int>(groups_.size()); }
  [[nodiscard]] ParameterGroup& group(int slot) const { return *groups_.at(static_cast<std::size_t>(slot)); }
  [[nodiscard]] int slot_of(const ParameterGroup& group) const;
  [[nodiscard]] std::vector<Sized> sizes() const;
  [[nodiscard]] const layout::ArenaPlan& plan() const noexcept { return plan_; }

  [[nodiscard]] std::byte* data(int slot, int rank) const { return memory_->peer(rank) + plan_.offset(slot); }
  [[nodiscard]] std::byte* data(int slot) const { return data(slot, peers_.rank()); }
  [[nodiscard]] ByteRange range(int slot) const;
  /// View of `parameter`'s range in its slot; keeps the memory alive.
  [[nodiscard]] at::Tensor gradient(int slot, const Parameter& parameter) const;
  /// Tensor of `sizes` at `data`, which lies in this rank's `slot`; keeps the memory alive.
  [[nodiscard]] at::Tensor over(int slot, std::byte* data, at::IntArrayRef sizes) const;
  /// The ranks' slots as one buffer: partial, or replicate (which an all-reduce in place makes of them).
  [[nodiscard]] buffer::ShardedBuffer buffer(int slot, layout::Placement placement) const;

 private:
  void allocate();
  void end_life(device::LaneKind lane, int slot);

  Peers& peers_;
  std::vector<ParameterGroup*> groups_;
  layout::ArenaPlan plan_;
  std::shared_ptr<device::Ledger> ledger_;
  std::shared_ptr<comm::PeerMemory> memory_;
  int64_t allocated_ = 0;    // bytes
  std::vector<bool> alive_;  // per slot
  std::vector<device::State> states_;
};

/// View of `parameter`'s range in a full gradient that begins at `base`, which `owner` keeps alive.
[[nodiscard]] at::Tensor gradient_view(std::shared_ptr<void> owner, std::byte* base,
                                       const Parameter& parameter);

/// Fills with zeros the ranges of `group` that got no contribution, in the full gradient at `base`, and only
/// those; rows that are late are nobody's there.
void zero_missing(device::Device& device, const ParameterGroup& group, std::byte* base);

}  // namespace fsdpp::runtime
