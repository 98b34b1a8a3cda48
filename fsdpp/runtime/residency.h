#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/runtime/order.h"
#include "fsdpp/runtime/plan.h"
#include "fsdpp/runtime/publisher.h"
#include "fsdpp/runtime/weight_arena.h"

namespace fsdpp::runtime {

/// A reason for a unit to stay gathered.
enum class Hold { forward, backward, prefetch, user, parts };
inline constexpr int kHoldKinds = 5;

/// Which units' full weights are here, and why. A unit is released when its last hold is dropped.
class Residency {
 public:
  /// `units[i]`: the parameter groups of unit i; `sizes[i]`: what a gather of it takes.
  Residency(Peers& peers, Publisher& publisher, std::vector<std::vector<ParameterGroup*>> units,
            std::vector<Sized> sizes, std::optional<int64_t> prefetch_bytes, layout::ArenaPlan plan,
            std::shared_ptr<device::Ledger> ledger);

  /// Adds a hold; the unit is gathered if it is not.
  void hold(int unit, Hold kind);
  /// Takes one hold away, if there is one.
  void drop(int unit, Hold kind);
  /// Takes away all holds of `kind`, of one unit or of all.
  void drop_all(int unit, Hold kind);
  void drop_all(Hold kind);

  /// Gathers in advance what `order` expects next: the next unit, or as many as Options::prefetch_bytes
  /// allows.
  void prefetch(const Order& order);

  /// Training begins: gathers keep parts for neighbours (InnerShards), once per epoch.
  void keep_parts() noexcept { keeping_ = true; }
  /// Keeps those that no gather has kept in this epoch since keep_parts(): the epoch is complete.
  void complete_parts();

  /// New weights were published: units that are here and whose own part was published in place get the rest.
  void renew();

  [[nodiscard]] bool resident(int unit) const {
    return entries_.at(static_cast<std::size_t>(unit)).memory != nullptr;
  }
  [[nodiscard]] int holds(int unit, Hold kind) const;
  [[nodiscard]] int64_t gathers() const noexcept { return gathers_; }
  [[nodiscard]] WeightArena& arena() noexcept { return arena_; }
  /// True when nothing is gathered.
  [[nodiscard]] bool at_rest() const noexcept;

 private:
  struct Entry {
    std::vector<ParameterGroup*> groups;
    std::array<int, kHoldKinds> holds{};
    std::byte* memory = nullptr;  // null: released
    uint32_t epoch = 0;           // of the weights in it
    device::Event gathered;       // on the gather lane: they are complete
    bool awaited = true;          // the compute lane waits for that
    device::State state = device::State::released;
  };

  void gather(int unit);
  void fetch(const ParameterGroup& group, std::byte* full);
  void keep(const ParameterGroup& group, const std::byte* full);
  [[nodiscard]] bool keeps(const ParameterGroup& group) const;
  void take_memory(int unit);
  void await(int unit);
  void release(int unit);
  void move(int unit, device::State to);
  [[nodiscard]] static bool stays(const Entry& entry) { return entry.groups.front()->own_place != nullptr; }

  Peers& peers_;
  Publisher& publisher_;
  std::vector<Entry> entries_;
  std::vector<Sized> sizes_;  // of the units' full weights that come and go
  std::optional<int64_t> prefetch_bytes_;
  WeightArena arena_;
  int64_t gathers_ = 0;
  bool keeping_ = false;
};

}  // namespace fsdpp::runtime
