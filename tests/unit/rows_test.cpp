// Rows of a table that is cut over ranks: gathered, and their gradients summed. The reference knows nothing
// of cuts.
#include "fsdpp/device/rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "fsdpp/base/error.h"

namespace fsdpp::device {
namespace {

struct Shape {
  int ranks;
  int64_t dim;
  int64_t shard_elements;  // ranks * shard_elements >= rows * dim
  int64_t rows;
};

// The last: rows that span several shards.
constexpr std::array<Shape, 6> kShapes = {
    {{1, 8, 296, 37}, {2, 8, 150, 37}, {3, 5, 64, 37}, {7, 24, 128, 37}, {8, 40, 192, 37}, {8, 20, 13, 5}}};

TEST(GatherRows, FindsEveryRowWhereverTheCutsAre) {
  for (const Shape& shape : kShapes) {
    for (const Element element : {Element::bf16, Element::fp32}) {
      const auto size = static_cast<int64_t>(element_size(element));
      std::vector<unsigned char> flat(static_cast<std::size_t>(shape.ranks * shape.shard_elements * size));
      for (std::size_t i = 0; i < flat.size(); ++i)
        flat[i] = static_cast<unsigned char>(i * 2654435761U >> 11);
      RowTable table;
      for (int r = 0; r < shape.ranks; ++r) table.shards[r] = flat.data() + r * shape.shard_elements * size;
      std::vector<std::vector<unsigned char>> copies;  // apart, so that reading over a cut does not go unseen
      for (int r = 0; r < shape.ranks; ++r) {
        const auto* const begin = static_cast<const unsigned char*>(table.shards[r]);
        table.shards[r] = copies.emplace_back(begin, begin + shape.shard_elements * size).data();
      }
      table.shard_elements = shape.shard_elements;
      table.rows = shape.rows;
      table.dim = shape.dim;
      table.element = element;
      std::vector<int64_t> ids = {0, shape.rows - 1, shape.rows / 3, shape.rows / 3, 2};
      for (int64_t id = 0; id < shape.rows; ++id) ids.push_back(id);
      std::vector<unsigned char> out(ids.size() * static_cast<std::size_t>(shape.dim * size));
      gather_rows(out.data(), ids, table);
      const int64_t row = shape.dim * size;
      for (std::size_t i = 0; i < ids.size(); ++i) {
        EXPECT_TRUE(std::equal(flat.begin() + ids[i] * row, flat.begin() + (ids[i] + 1) * row,
                               out.begin() + static_cast<int64_t>(i) * row))
            << "id " << ids[i] << " of " << shape.ranks << " ranks";
      }
    }
  }
}

TEST(GatherRows, RefusesIdsThatAreNotThere) {
  const std::vector<float> shard(8);
  RowTable table;
  table.shards[0] = shard.data();
  table.shard_elements = 8;
  table.rows = 2;
  table.dim = 4;
  table.element = Element::fp32;
  std::vector<float> out(4);
  EXPECT_THROW(gather_rows(out.data(), std::array<int64_t, 1>{2}, table), UsageError);
  EXPECT_THROW(gather_rows(out.data(), std::array<int64_t, 1>{-1}, table), UsageError);
}

// Ids and gradients of every rank, with what is needed to hand them over.
struct Lookups {
  Lookups(const Shape& shape, uint64_t seed) {
    std::mt19937_64 random(seed);
    gradients.ranks = shape.ranks;
    gradients.dim = shape.dim;
    gradients.element = Element::fp32;
    values.resize(static_cast<std::size_t>(shape.ranks));
    for (int r = 0; r < shape.ranks; ++r) {
      gradients.counts[r] = r == 1 ? 0 : static_cast<int64_t>(random() % 60);
      for (int64_t i = 0; i < gradients.counts[r]; ++i) {
        ids.push_back(random() % 3 == 0
                          ? shape.rows / 3
                          : static_cast<int64_t>(
                                random() % static_cast<uint64_t>(shape.rows - 2)));  // the last two never
        for (int64_t k = 0; k < shape.dim; ++k)
          values[static_cast<std::size_t>(r)].push_back(
              std::ldexp(static_cast<float>(random() % 1999) - 999.0F, static_cast<int>(random() % 20) - 10));
      }
      gradients.gradients[r] = values[static_cast<std::size_t>(r)].data();
    }
    order.resize(ids.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return at(a) < at(b); });
    for (const int64_t position : order) sorted.push_back(at(position));
  }
  [[nodiscard]] int64_t at(int64_t position) const { return ids[static_cast<std::size_t>(position)]; }
  [[nodiscard]] SortedIds sorted_ids() const {
    return {sorted.data(), order.data(), static_cast<int64_t>(sorted.size())};
  }
  std::vector<int64_t> ids;
  std::vector<int64_t> order;
  std::vector<int64_t> sorted;
  std::vector<std::vector<float>> values;
  RowGradients gradients;
};

// The full table's sums, occurrence by occurrence, without sorting.
std::vector<float> sums_of(const Shape& shape, const Lookups& lookups, std::vector<float> table, float scale,
                           bool add) {
  const int64_t dim = lookups.gradients.dim;
  for (int64_t id = 0; id < shape.rows; ++id) {
    for (int64_t k = 0; k < dim; ++k) {
      float sum = 0;
      bool seen = false;
      int64_t position = 0;
      for (std::size_t r = 0; r < lookups.values.size(); ++r) {
        for (int64_t i = 0; i < lookups.gradients.counts[r]; ++i, ++position) {
          if (lookups.at(position) != id) continue;
          const float value = lookups.values[r][static_cast<std::size_t>(i * dim + k)];
          sum = seen ? sum + value : value;
          seen = true;
        }
      }
      float& target = table[static_cast<std::size_t>(id * dim + k)];
      const volatile float scaled = scale * sum;  // rounded before it is added
      if (seen) target = add ? target + scaled : scaled;
    }
  }
  return table;
}

TEST(AddRows, SumsEachRowInRankOrderIntoItsOwners) {
  for (const Shape& shape : kShapes) {
    for (const bool add : {false, true}) {
      const Lookups lookups(shape, 11 + static_cast<uint64_t>(shape.dim));
      std::vector<float> table(static_cast<std::size_t>(shape.ranks * shape.shard_elements));
      for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<float>(i % 101) / 7;
      const std::vector<float> expected = sums_of(shape, lookups, table, 1.0F / 3, add);
      for (int r = 0; r < shape.ranks; ++r) {
        const int64_t begin = r * shape.shard_elements;
        std::vector<float> shard(table.begin() + begin, table.begin() + begin + shape.shard_elements);
        add_rows({shard.data(), begin, shape.shard_elements}, lookups.sorted_ids(), lookups.gradients,
                 1.0F / 3, add);
        EXPECT_TRUE(std::equal(shard.begin(), shard.end(), expected.begin() + begin))
            << "rank " << r << " of " << shape.ranks << ", add " << add;
      }
    }
  }
}

TEST(AddRows, ReadsHalvesExactly) {
  // fp16: one, the smallest subnormal, the largest, minus two, infinity; and as bf16.
  const std::array<uint16_t, 5> fp16 = {0x3c00, 0x0001, 0x7bff, 0xc000, 0x7c00};
  const std::array<float, 5> as_fp16 = {1, 0x1p-24F, 65504, -2, std::bit_cast<float>(0x7f800000U)};
  const std::array<uint16_t, 5> bf16 = {0x3f80, 0x0001, 0x7f7f, 0xc000, 0x7f80};
  const std::array<float, 5> as_bf16 = {1, 0x1p-133F, 0x1.fep127F, -2, std::bit_cast<float>(0x7f800000U)};
  const int64_t id = 0;
  const int64_t order = 0;
  RowGradients gradients;
  gradients.ranks = 1;
  gradients.counts[0] = 1;
  gradients.dim = 5;
  std::array<float, 5> out{};
  for (const bool is_fp16 : {true, false}) {
    gradients.gradients[0] = is_fp16 ? fp16.data() : bf16.data();
    gradients.element = is_fp16 ? Element::fp16 : Element::bf16;
    add_rows({out.data(), 0, 5}, {&id, &order, 1}, gradients, 1, false);
    EXPECT_EQ(out, is_fp16 ? as_fp16 : as_bf16);
  }
}

TEST(AddRows, DoesNotReadGradientsOfOthersElements) {
  // Rank 1's gradients are not even there: the one row among its ids is another's.
  const std::array<int64_t, 2> sorted = {0, 3};
  const std::array<int64_t, 2> order = {0, 1};
  const std::array<float, 2> row = {1, 2};
  RowGradients gradients;
  gradients.ranks = 2;
  gradients.counts[0] = gradients.counts[1] = 1;
  gradients.dim = 2;
  gradients.element = Element::fp32;
  gradients.gradients[0] = row.data();
  std::array<float, 4> out = {-1, -1, -1, -1};
  add_rows({out.data(), 0, 4}, {sorted.data(), order.data(), 2}, gradients, 2, false);
  EXPECT_EQ(out, (std::array<float, 4>{2, 4, -1, -1}));
}

}  // namespace
}  // namespace fsdpp::device
