#include <gtest/gtest.h>

#include "fsdpp/device/host.h"
#include "fsdpp/device/sanitizer.h"
#include "fsdpp/runtime/order.h"
#include "fsdpp/runtime/pass.h"
#include "fsdpp/runtime/plan.h"
#include "fsdpp/runtime/weight_arena.h"

namespace fsdpp::runtime {
namespace {

std::vector<int> units_of(const std::vector<Visit>& visits) {
  std::vector<int> units;
  for (const Visit& visit : visits) units.push_back(visit.unit);
  return units;
}

// One pass over a root with the given units inside, as a forward does it.
bool run_pass(Order& order, const std::vector<int>& inner) {
  order.begin();
  order.arrive(0);
  for (const int unit : inner) {
    order.arrive(unit);
    order.leave(unit);
  }
  order.leave(0);
  return order.complete();
}

TEST(Order, PredictsTheNextUnitOfTheStructure) {
  const std::vector<int> structure = {0, 1, 2};
  Order order(structural_visits(structure));
  order.begin();
  EXPECT_EQ(order.arrive(0), 1);
  EXPECT_EQ(order.arrive(1), 2);
  EXPECT_EQ(order.arrive(2), -1);
  EXPECT_EQ(order.departures(), 0);
}

TEST(Order, ReplaysWhatACompletePassDid) {
  const std::vector<int> structure = {0, 1, 2, 3};
  Order order(structural_visits(structure));
  EXPECT_TRUE(run_pass(order, {3, 1, 2}));
  EXPECT_GT(order.departures(), 0);
  const int64_t before = order.departures();
  EXPECT_FALSE(run_pass(order, {3, 1, 2})) << "the same order again is no change";
  EXPECT_EQ(order.departures(), before);
  EXPECT_EQ(units_of(order.expected()), (std::vector<int>{0, 3, 1, 2}));
}

TEST(Order, ASkippedUnitIsOneDepartureAndThePredictionGoesOn) {
  const std::vector<int> structure = {0, 1, 2, 3};
  Order order(structural_visits(structure));
  order.begin();
  order.arrive(0);
  EXPECT_EQ(order.arrive(2), 3);
  EXPECT_EQ(order.departures(), 1);
}

TEST(Order, AnIncompletePassIsNotExpectedNextTime) {
  const std::vector<int> structure = {0, 1, 2};
  Order order(structural_visits(structure));
  order.begin();
  order.arrive(2);
  order.begin();
  EXPECT_EQ(order.arrive(0), 1);
  EXPECT_EQ(units_of(order.expected()), structure);
}

TEST(Order, AUnitVisitedTwiceIsPredictedTwice) {
  const std::vector<int> structure = {0, 1};
  Order order(structural_visits(structure));
  run_pass(order, {1, 1});
  order.begin();
  EXPECT_EQ(order.arrive(0), 1);
  EXPECT_EQ(order.arrive(1), 1);
  EXPECT_EQ(order.arrive(1), -1);
}

TEST(Plan, WeightsOfAChainNeedTheRootAndTwoUnits) {
  std::vector<Sized> units = {{"root", 1024}};
  for (int i = 0; i < 8; ++i) units.push_back({"unit", 4096});
  std::vector<int> structure;
  for (int i = 0; i < 9; ++i) structure.push_back(i);
  const std::vector<std::vector<Visit>> orders = {structural_visits(structure)};
  EXPECT_EQ(plan_weights(units, orders).bytes(), 1024 + 2 * 4096 + 3 * device::kRedZone);
}

TEST(Plan, SlotsOfAChainAreARingOfTwo) {
  std::vector<Sized> slots(6, {"slot", 2048});
  std::vector<SlotUse> uses;
  for (int i = 0; i < 6; ++i) uses.push_back({5 - i, i});
  const layout::ArenaPlan plan = plan_slots(slots, uses);
  EXPECT_EQ(plan.bytes(), 2 * (2048 + device::kRedZone));
  EXPECT_FALSE(plan.share_bytes(5, 4));
  EXPECT_TRUE(plan.share_bytes(5, 3));
}

TEST(Plan, ASlotOpenAllBackwardSharesWithNobody) {
  const std::vector<Sized> slots = {{"tied", 512}, {"a", 2048}, {"b", 2048}, {"c", 2048}};
  const std::vector<SlotUse> uses = {{3, 0}, {2, 1}, {1, 2}, {0, 0}};
  const layout::ArenaPlan plan = plan_slots(slots, uses);
  for (int other = 1; other < 4; ++other) EXPECT_FALSE(plan.share_bytes(0, other));
}

// Three units in a chain, one ahead: the first and the last lie on the same bytes.
layout::ArenaPlan chain_of_three() {
  const std::vector<Sized> units = {{"a", 1024}, {"b", 1024}, {"c", 1024}};
  const std::vector<std::vector<Visit>> orders = {{{0, 0, 0}, {1, 1, 1}, {2, 2, 2}}};
  return plan_weights(units, orders);
}

TEST(WeightArena, ARedZoneFollowsEveryUnitAndReleasedMemoryIsPoisoned) {
  constexpr bool kPoisons = device::kRedZone > 0;  // in ASan builds
  device::HostDevice device;
  WeightArena arena(device, chain_of_three(), std::make_shared<device::Ledger>());
  const std::byte* memory = arena.acquire(0);
  EXPECT_FALSE(device::is_poisoned(memory));
  EXPECT_FALSE(device::is_poisoned(memory + 1023));
  EXPECT_EQ(device::is_poisoned(memory + 1024), kPoisons);
  arena.release(0);
  EXPECT_EQ(device::is_poisoned(memory), kPoisons);
}

TEST(WeightArena, AUnitWhosePlaceIsTakenGetsOrdinaryMemory) {
  device::HostDevice device;
  const auto ledger = std::make_shared<device::Ledger>();
  WeightArena arena(device, chain_of_three(), ledger);
  ASSERT_TRUE(arena.plan().share_bytes(0, 2));
  const std::byte* first = arena.acquire(0);
  const int64_t planned = ledger->current();
  const std::byte* last = arena.acquire(2);
  EXPECT_NE(first, last);
  EXPECT_EQ(arena.overflows(), 1);
  EXPECT_EQ(ledger->current(), planned + 1024);
  arena.release(2);
  EXPECT_EQ(ledger->current(), planned);
  arena.release(0);
  EXPECT_EQ(arena.acquire(2), first) << "the planned place is free again";
  arena.release(2);
}

TEST(Pass, MovesThroughItsPhases) {
  Pass pass(1, true, false);
  pass.move_to(Phase::waiting);
  pass.move_to(Phase::backward);
  pass.move_to(Phase::done);
  pass.move_to(Phase::backward);
  EXPECT_EQ(pass.phase(), Phase::backward);
}

TEST(PassDeathTest, AForbiddenMoveNamesBothPhases) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Pass pass(1, true, false);
  pass.move_to(Phase::waiting);
  EXPECT_DEATH(pass.move_to(Phase::done), "waiting cannot go to done");
}

TEST(PassTable, ForgetsPassesWhoseGraphIsGone) {
  PassTable table;
  auto kept = std::make_shared<Pass>(0, true, false);
  table.add(kept);
  table.add(std::make_shared<Pass>(0, true, false));
  EXPECT_EQ(table.alive().size(), 1U);
  kept->move_to(Phase::waiting);
  kept->move_to(Phase::backward);
  table.complete_backward();
  EXPECT_EQ(kept->phase(), Phase::done);
}

}  // namespace
}  // namespace fsdpp::runtime
