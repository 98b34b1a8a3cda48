#include "fsdpp/trace/interval_map.h"

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <vector>

namespace fsdpp::trace {
namespace {

using Map = IntervalMap<int>;

std::vector<std::array<uintptr_t, 3>> pieces_of(const Map& map, uintptr_t first, uintptr_t end) {
  std::vector<std::array<uintptr_t, 3>> pieces;
  map.look(first, end, [&](const Map::Piece& piece, int value) {
    pieces.push_back({piece.first, piece.end, static_cast<uintptr_t>(value)});
  });
  return pieces;
}

TEST(IntervalMap, CutsAtTheEdgesOfAnUpdateAndJoinsEqualNeighbours) {
  Map map;
  map.update(10, 20, [](const Map::Piece&, int& value) { value = 1; });
  map.update(14, 16, [](const Map::Piece&, int& value) { value = 2; });
  EXPECT_EQ(pieces_of(map, 0, 100),
            (std::vector<std::array<uintptr_t, 3>>{{10, 14, 1}, {14, 16, 2}, {16, 20, 1}}));
  EXPECT_EQ(pieces_of(map, 12, 15), (std::vector<std::array<uintptr_t, 3>>{{12, 14, 1}, {14, 15, 2}}));
  map.update(12, 18, [](const Map::Piece&, int& value) { value = 1; });
  EXPECT_EQ(map.pieces(), 1U);
  map.update(20, 22, [](const Map::Piece&, int& value) { value = 1; });
  EXPECT_EQ(pieces_of(map, 0, 100), (std::vector<std::array<uintptr_t, 3>>{{10, 22, 1}}));
  map.erase(11, 12);
  EXPECT_EQ(pieces_of(map, 0, 100), (std::vector<std::array<uintptr_t, 3>>{{10, 11, 1}, {12, 22, 1}}));
}

TEST(IntervalMap, AgreesWithAnArrayOfBytes) {
  std::mt19937 random(3);
  Map map;
  std::array<int, 64> bytes{};
  for (int round = 0; round < 20000; ++round) {
    uintptr_t first = random() % 64;
    uintptr_t end = random() % 65;
    if (first > end) std::swap(first, end);
    const int value = static_cast<int>(random() % 3) + 1;
    if (random() % 5 == 0) {
      map.erase(first, end);
      std::fill(bytes.begin() + first, bytes.begin() + end, 0);
    } else {
      uintptr_t at = first;
      map.update(first, end, [&](const Map::Piece& piece, int& held) {
        ASSERT_EQ(piece.first, at);
        for (uintptr_t i = piece.first; i < piece.end; ++i) ASSERT_EQ(bytes[i], held) << i;
        at = piece.end;
        held = value;
      });
      ASSERT_EQ(at, std::max(at, end));
      std::fill(bytes.begin() + first, bytes.begin() + end, value);
    }
    std::array<int, 64> seen{};
    map.look(0, 64, [&](const Map::Piece& piece, int held) {
      std::fill(seen.begin() + piece.first, seen.begin() + piece.end, held);
    });
    ASSERT_EQ(seen, bytes) << "round " << round;
  }
}

}  // namespace
}  // namespace fsdpp::trace
