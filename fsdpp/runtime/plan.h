#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdpp/layout/arena_plan.h"
#include "fsdpp/runtime/order.h"

namespace fsdpp::runtime {

/// Something to place: a unit's full weights, or a group's gradient slot.
struct Sized {
  std::string name;
  int64_t bytes;
  bool here = false;  // weights that are never gathered, since each rank has them whole
};

/// The visits of a first pass, from the structure alone: units in `order`, the root (unit 0, which must come
/// first) around all others.
[[nodiscard]] std::vector<Visit> structural_visits(std::span<const int> order);

/// How many of the units that are expected next (`ahead`) are gathered in advance: up to the next one that is
/// gathered at all; or, with `budget` (bytes), as many as fit in it together, in their order.
[[nodiscard]] std::size_t prefetched(std::span<const Visit> ahead, std::span<const Sized> units,
                                     std::optional<int64_t> budget);

/// Offsets for full weights such that no unit of a pass in one of `orders` collides with another, with
/// gathers in advance as prefetched() says. In ASan builds a red zone follows each
/// buffer (device::kRedZone).
[[nodiscard]] layout::ArenaPlan plan_weights(std::span<const Sized> units,
                                             std::span<const std::vector<Visit>> orders,
                                             std::optional<int64_t> budget = std::nullopt);

/// A gradient slot's turn: `position` is its place in the order of reduces; `opened` the number of reduces
/// before its first contribution.
struct SlotUse {
  int slot;
  int opened;
};

/// Offsets for gradient slots, whose reduces run in the order of `uses`. A slot's bytes are its own until one
/// more reduce has been launched, so that a rank does not wait for the peers' pulls of the reduce before.
[[nodiscard]] layout::ArenaPlan plan_slots(std::span<const Sized> slots, std::span<const SlotUse> uses);

}  // namespace fsdpp::runtime
