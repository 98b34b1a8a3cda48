#include "fsdpp/layout/shard_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "fsdpp/base/error.h"

// A corrupted layout cannot be built through the interface, so the tests of check() reach the members
// themselves: the standard lets an explicit instantiation name a private member.
template <auto Member>
struct OpenShardLayout {
  friend auto& shard_layout_segments(fsdpp::layout::ShardLayout& layout) { return layout.*Member; }
};
auto& shard_layout_segments(fsdpp::layout::ShardLayout& layout);
template struct OpenShardLayout<&fsdpp::layout::ShardLayout::segments_>;

namespace fsdpp::layout {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kBytes[] = {1, 2, 4, 8};

int64_t product(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// Sizes and offsets, from the public face alone, with arithmetic of its own.
void check_places(const std::vector<Shape>& shapes, int64_t element_bytes, int ranks,
                  const ShardLayout& layout) {
  ASSERT_EQ(layout.ranks(), ranks);
  ASSERT_EQ(layout.element_bytes(), element_bytes);
  ASSERT_EQ(layout.parameters().size(), shapes.size());
  ASSERT_EQ(layout.full_numel(), ranks * layout.shard_numel());
  ASSERT_EQ(layout.shard_numel() * element_bytes % 256, 0);
  const int count = static_cast<int>(shapes.size());

  // Big first, ties in list order, each at the first aligned element after the last.
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    const int64_t size_a = product(shapes[a].sizes);
    const int64_t size_b = product(shapes[b].sizes);
    return size_a != size_b ? size_a > size_b : a < b;
  });
  const int64_t block = 256 / element_bytes;  // elements
  int64_t end = 0;
  int64_t owned = 0;
  for (const int i : order) {
    const int64_t numel = product(shapes[i].sizes);
    ASSERT_EQ(layout.parameters()[i].name, shapes[i].name);
    ASSERT_EQ(layout.parameters()[i].sizes, shapes[i].sizes);
    ASSERT_EQ(layout.parameter_numel(i), numel);
    if (numel > 0 && end % block != 0) end += block - end % block;
    ASSERT_EQ(layout.parameter_offset(i), numel > 0 ? end : 0) << shapes[i].name;
    if (numel > 0) end += numel;
    owned += numel;
  }
  // Equal shards that hold it all, and no larger than the alignment makes them.
  ASSERT_GE(layout.full_numel(), end);
  const int64_t smaller = layout.shard_numel() - block;
  ASSERT_TRUE(layout.shard_numel() == 0 ? end == 0 : ranks * smaller < end);
  ASSERT_EQ(layout.padding_numel(), layout.full_numel() - owned);
}

// The segments tile each parameter exactly, in order, and agree with the full buffer.
void check_tiling(const std::vector<Shape>& shapes, const ShardLayout& layout) {
  const int count = static_cast<int>(shapes.size());
  std::vector<int64_t> covered(count, 0);
  int64_t last = 0;  // end of the segment before, in the full buffer
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    for (const Segment& segment : layout.segments(rank)) {
      ASSERT_GE(segment.parameter, 0);
      ASSERT_LT(segment.parameter, count);
      ASSERT_GT(segment.count, 0);
      ASSERT_GE(segment.shard_offset, 0);
      ASSERT_LE(segment.shard_offset + segment.count, layout.shard_numel());
      ASSERT_EQ(segment.shard_offset * layout.element_bytes() % 256, 0);
      ASSERT_EQ(segment.parameter_offset, covered[segment.parameter]);
      const int64_t full = rank * layout.shard_numel() + segment.shard_offset;
      ASSERT_EQ(full, layout.parameter_offset(segment.parameter) + segment.parameter_offset);
      ASSERT_GE(full, last) << "segments overlap or are out of order";
      last = full + segment.count;
      covered[segment.parameter] += segment.count;
    }
  }
  for (int i = 0; i < count; ++i) ASSERT_EQ(covered[i], product(shapes[i].sizes)) << shapes[i].name;
}

// Every promise of the header.
void check_promises(const std::vector<Shape>& shapes, int64_t element_bytes, int ranks,
                    const ShardLayout& layout) {
  check_places(shapes, element_bytes, ranks, layout);
  if (!testing::Test::HasFatalFailure()) check_tiling(shapes, layout);
}

// Element by element: paints every segment into an array of the full buffer, then reads each parameter back.
void check_by_painting(const std::vector<Shape>& shapes, const ShardLayout& layout) {
  struct Owner {
    int parameter = -1;
    int64_t element = -1;
  };
  std::vector<Owner> full(layout.full_numel());
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    for (const Segment& segment : layout.segments(rank)) {
      for (int64_t i = 0; i < segment.count; ++i) {
        Owner& owner = full.at(rank * layout.shard_numel() + segment.shard_offset + i);
        ASSERT_EQ(owner.parameter, -1) << "an element of two parameters";
        owner = {segment.parameter, segment.parameter_offset + i};
      }
    }
  }
  const int64_t padding =
      std::count_if(full.begin(), full.end(), [](const Owner& o) { return o.parameter < 0; });
  ASSERT_EQ(padding, layout.padding_numel());
  for (int parameter = 0; parameter < static_cast<int>(shapes.size()); ++parameter) {
    for (int64_t i = 0; i < product(shapes[parameter].sizes); ++i) {
      const Owner& owner = full.at(layout.parameter_offset(parameter) + i);
      if (owner.parameter != parameter || owner.element != i) {
        FAIL() << shapes[parameter].name << " element " << i << " is held by parameter " << owner.parameter
               << " element " << owner.element;
      }
    }
  }
}

std::vector<int64_t> random_sizes(std::mt19937_64& random) {
  static const std::vector<std::vector<int64_t>> kSpecial = {
      {}, {1}, {0}, {0, 4}, {4, 0, 3}, {1, 1, 1}, {33}, {5, 7}, {256}, {255}, {257}, {1, 100003}};
  const uint64_t kind = random() % 10;
  if (kind < 3) return kSpecial[random() % kSpecial.size()];
  const int64_t limit = kind < 8 ? 24 : 6000;  // most are small, so that painting stays cheap
  std::vector<int64_t> sizes(1 + random() % 3);
  for (int64_t& size : sizes) size = 1 + static_cast<int64_t>(random() % limit);
  return sizes;
}

std::string describe(const std::vector<Shape>& shapes, int64_t element_bytes, int ranks) {
  std::string out = std::to_string(ranks) + " ranks, " + std::to_string(element_bytes) + " bytes:";
  for (const Shape& shape : shapes) out += " " + to_string(shape);
  return out;
}

TEST(ShardLayout, RandomListsKeepEveryPromise) {
  constexpr int kLists = 20000;
  int painted = 0;
  for (uint64_t seed = 1; seed <= kLists; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<Shape> shapes(random() % 13);
    for (size_t i = 0; i < shapes.size(); ++i) shapes[i] = {"p" + std::to_string(i), random_sizes(random)};
    const int64_t element_bytes = kBytes[random() % 4];
    const int ranks = static_cast<int>(1 + random() % 64);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + describe(shapes, element_bytes, ranks));

    const ShardLayout layout = ShardLayout::flat(shapes, element_bytes, ranks);
    check_promises(shapes, element_bytes, ranks, layout);
    if (!HasFatalFailure() && layout.full_numel() <= 2048) {
      ++painted;
      check_by_painting(shapes, layout);
    }
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(painted, kLists / 10) << "too few lists were small enough for the element-wise check";
}

// Each shard of a hybrid mesh is cut over the replicas: both layouts mean the same places.
TEST(ShardLayout, PartsOfShardsAreTheShardsOfMoreRanks) {
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<Shape> shapes(1 + random() % 6);
    for (size_t i = 0; i < shapes.size(); ++i) shapes[i] = {"p" + std::to_string(i), random_sizes(random)};
    const int64_t element_bytes = kBytes[random() % 4];
    const int ranks = static_cast<int>(1 + random() % 9);
    const int parts = static_cast<int>(1 + random() % 5);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + describe(shapes, element_bytes, ranks));
    const ShardLayout coarse = ShardLayout::flat(shapes, element_bytes, ranks, parts);
    const ShardLayout fine = ShardLayout::flat(shapes, element_bytes, ranks * parts);
    ASSERT_EQ(coarse.full_numel(), fine.full_numel());
    ASSERT_EQ(coarse.shard_numel(), parts * fine.shard_numel());
    for (int i = 0; i < static_cast<int>(shapes.size()); ++i)
      ASSERT_EQ(coarse.parameter_offset(i), fine.parameter_offset(i));
    coarse.check();
  }
  EXPECT_THROW(static_cast<void>(ShardLayout::flat({{"w", {4}}}, 4, 2, 0)), UsageError);
}

TEST(ShardLayout, SmallAndEmptyShapes) {
  const std::vector<std::vector<Shape>> lists = {
      {},
      {{"empty", {0, 4}}},
      {{"scalar", {}}},
      {{"one", {1}}},
      {{"scalar", {}}, {"empty", {0, 4}}, {"one", {1}}, {"empty too", {3, 0}}, {"w", {7, 9}}}};
  for (const std::vector<Shape>& shapes : lists) {
    for (const int64_t element_bytes : kBytes) {
      for (const int ranks : {1, 2, 3, 4, 64}) {
        SCOPED_TRACE(describe(shapes, element_bytes, ranks));
        const ShardLayout layout = ShardLayout::flat(shapes, element_bytes, ranks);
        check_promises(shapes, element_bytes, ranks, layout);
        check_by_painting(shapes, layout);
      }
    }
  }
  const ShardLayout scalar = ShardLayout::flat({{"scalar", {}}}, 4, 4);
  EXPECT_EQ(scalar.shard_numel(), 64);
  EXPECT_EQ(scalar.padding_numel(), 255);
  EXPECT_EQ(scalar.segments(0).size(), 1u);
  EXPECT_TRUE(scalar.segments(3).empty());
  EXPECT_EQ(ShardLayout::flat({{"empty", {0, 4}}}, 4, 4).full_numel(), 0);
}

TEST(ShardLayout, FewRowsOnFourRanksAreCutInsideTheRow) {
  for (const int64_t rows : {1, 3, 5, 33}) {
    for (const int64_t width : {1, 63, 64, 65, 1000, 4096}) {
      for (const int64_t element_bytes : kBytes) {
        const std::vector<Shape> shapes = {{"w", {rows, width}}, {"b", {rows}}};
        SCOPED_TRACE(describe(shapes, element_bytes, 4));
        const ShardLayout layout = ShardLayout::flat(shapes, element_bytes, 4);
        check_promises(shapes, element_bytes, 4, layout);
        check_by_painting(shapes, layout);
      }
    }
  }
  // One row of 4096 floats: a quarter on each rank and nothing wasted.
  const ShardLayout row = ShardLayout::flat({{"row", {1, 4096}}}, 4, 4);
  EXPECT_EQ(row.padding_numel(), 0);
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_EQ(row.segments(rank).size(), 1u);
    EXPECT_EQ(row.segments(rank)[0].parameter_offset, rank * 1024);
    EXPECT_EQ(row.segments(rank)[0].count, 1024);
  }
}

TEST(ShardLayout, HugeRowsDoNotCostTheRanksTimesTheirMemory) {
  for (const int ranks : {2, 3, 8, 64}) {
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{1, 1000000007}, {3, 300000001}, {65, 10000019}, {int64_t{1} << 40}}) {
      const std::vector<Shape> shapes = {{"wide", sizes}, {"bias", {1}}};
      SCOPED_TRACE(describe(shapes, 2, ranks));
      const ShardLayout layout = ShardLayout::flat(shapes, 2, ranks);
      check_promises(shapes, 2, ranks, layout);
      EXPECT_LE(layout.padding_numel() * 2, 256 * (ranks + 2));  // a block per rank and per parameter
    }
  }
}

// The units of real models, as a block is wrapped: all its parameters together.
std::vector<std::vector<Shape>> real_units() {
  const auto llama = [](int64_t width, int64_t kv, int64_t hidden) {
    return std::vector<Shape>{{"q", {width, width}},     {"k", {kv, width}},        {"v", {kv, width}},
                              {"o", {width, width}},     {"gate", {hidden, width}}, {"up", {hidden, width}},
                              {"down", {width, hidden}}, {"norm1", {width}},        {"norm2", {width}}};
  };
  // DeepSeek-V3's published configuration: width 7168, query rank 1536, 128 heads, dense hidden size 18432.
  const std::vector<Shape> attention = {{"q_a", {1536, 7168}}, {"q_a_norm", {1536}}, {"q_b", {24576, 1536}},
                                        {"kv_a", {576, 7168}}, {"kv_a_norm", {512}}, {"kv_b", {32768, 512}},
                                        {"o", {7168, 16384}},  {"norm1", {7168}},    {"norm2", {7168}}};
  std::vector<Shape> dense = attention;
  dense.insert(dense.end(), {{"gate", {18432, 7168}}, {"up", {18432, 7168}}, {"down", {7168, 18432}}});
  std::vector<Shape> experts = attention;
  experts.insert(experts.end(), {{"router", {256, 7168}}, {"router_bias", {256}}});
  for (int i = 0; i < 257; ++i) {  // 256 routed experts and the shared one
    const std::string name = "expert" + std::to_string(i);
    experts.insert(
        experts.end(),
        {{name + ".gate", {2048, 7168}}, {name + ".up", {2048, 7168}}, {name + ".down", {7168, 2048}}});
  }
  return {llama(4096, 1024, 14336),
          llama(8192, 1024, 28672),
          llama(16384, 1024, 53248),
          dense,
          experts,
          {{"embedding", {129280, 7168}}},
          {{"w", {18432, 7168}}},
          {{"w", {16384, 7168}}},
          {{"w", {7168, 16384}}}};
}

TEST(ShardLayout, PaddingOfRealModelsIsAtMostOnePercent) {
  for (const std::vector<Shape>& unit : real_units()) {
    for (const int64_t element_bytes : kBytes) {
      for (const int ranks : {8, 64}) {
        SCOPED_TRACE(describe({unit.front()}, element_bytes, ranks));
        const ShardLayout layout = ShardLayout::flat(unit, element_bytes, ranks);
        check_promises(unit, element_bytes, ranks, layout);
        EXPECT_LE(100 * layout.padding_numel(), layout.full_numel() - layout.padding_numel());
      }
    }
  }
}

TEST(ShardLayout, TheSameShapesGiveTheSameLayout) {
  const std::vector<Shape> shapes = {{"a", {5}}, {"b", {7, 100}}, {"c", {100, 7}}, {"d", {5}}};
  const ShardLayout one = ShardLayout::flat(shapes, 4, 3);
  const ShardLayout two = ShardLayout::flat(shapes, 4, 3);
  EXPECT_LT(one.parameter_offset(1), one.parameter_offset(2));  // ties in list order
  EXPECT_LT(one.parameter_offset(2), one.parameter_offset(0));  // big first
  EXPECT_LT(one.parameter_offset(0), one.parameter_offset(3));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(one.parameter_offset(i), two.parameter_offset(i));
}

// The message of the UsageError that flat throws; empty when the input is accepted.
std::string rejection(std::vector<Shape> shapes, int64_t element_bytes = 4, int ranks = 4) {
  try {
    static_cast<void>(ShardLayout::flat(std::move(shapes), element_bytes, ranks));
    return "";
  } catch (const UsageError& error) {
    return error.what();
  }
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(ShardLayout, IllegalInputIsRejectedByName) {
  const Shape fine = {"fine", {2, 2}};
  EXPECT_TRUE(contains(rejection({fine, {"bad", {3, -1}}}), "bad[3, -1]"));
  EXPECT_TRUE(contains(rejection({fine, {"bad", {0, -1}}}), "bad[0, -1]"));
  EXPECT_TRUE(contains(rejection({fine, {"bad", {std::numeric_limits<int64_t>::min()}}}), "bad["));
  EXPECT_TRUE(contains(rejection({fine, {"big", {int64_t{1} << 32, int64_t{1} << 31}}}), "big[4294967296, "));
  EXPECT_TRUE(contains(rejection({fine, {"big", {kMax, kMax, kMax}}}), "big["));
  EXPECT_TRUE(contains(rejection({fine, {"wide", {kMax / 2}}}, 8, 1), "wide["));
  EXPECT_TRUE(contains(rejection({fine, {"wide", {kMax}}}, 1, 1), "wide["));  // fits, but not once padded
  for (const int64_t bytes : {-4, 0, 3, 5, 16}) {
    EXPECT_TRUE(contains(rejection({fine}, bytes), "element_bytes is " + std::to_string(bytes)));
  }
  for (const int ranks : {0, -1, std::numeric_limits<int>::min()}) {
    EXPECT_TRUE(contains(rejection({fine}, 4, ranks), "ranks is " + std::to_string(ranks)));
  }
}

TEST(ShardLayout, TotalsBeyondInt64AreRejected) {
  // Each fits alone. The smaller one comes later in the buffer, so it is the one that does not fit any more.
  EXPECT_TRUE(
      contains(rejection({{"half", {int64_t{1} << 60}}, {"more", {(int64_t{1} << 60) + 64}}}, 4), "half["));
  EXPECT_EQ(rejection({{"most", {kMax - 255}}}, 1, 1), "");
  EXPECT_TRUE(
      contains(rejection({{"most", {kMax - 255}}}, 1, 64), "ranks is 64"));  // padding takes it beyond
  const ShardLayout most = ShardLayout::flat({{"most", {kMax - 255}}}, 1, 1);
  EXPECT_EQ(most.full_numel(), kMax - 255);
  EXPECT_EQ(most.padding_numel(), 0);
}

TEST(ShardLayout, UnknownIndicesThrow) {
  const ShardLayout layout = ShardLayout::flat({{"w", {4, 4}}}, 4, 2);
  EXPECT_THROW(static_cast<void>(layout.segments(-1)), std::out_of_range);
  EXPECT_THROW(static_cast<void>(layout.segments(2)), std::out_of_range);
  EXPECT_THROW(static_cast<void>(layout.parameter_offset(-1)), std::out_of_range);
  EXPECT_THROW(static_cast<void>(layout.parameter_offset(1)), std::out_of_range);
  EXPECT_THROW(static_cast<void>(layout.parameter_numel(1)), std::out_of_range);
}

TEST(ShardLayoutDeathTest, CheckAbortsOnABrokenLayout) {
  const ShardLayout intact = ShardLayout::flat({{"w", {100, 10}}, {"b", {10}}}, 4, 4);
  intact.check();
  const auto broken = [&](auto change) {
    ShardLayout layout = intact;
    change(shard_layout_segments(layout));
    layout.check();
  };
  EXPECT_DEATH(broken([](auto& s) { s[1][0].count -= 1; }), "broken invariant.*w\\[100, 10\\]");
  EXPECT_DEATH(broken([](auto& s) { s[1][0].count += 64; }), "broken invariant.*w\\[100, 10\\]");
  EXPECT_DEATH(broken([](auto& s) { s[0][0].shard_offset += 64; }), "broken invariant.*w\\[100, 10\\]");
  EXPECT_DEATH(broken([](auto& s) { s[0][0].parameter_offset = 1; }), "broken invariant.*w\\[100, 10\\]");
  EXPECT_DEATH(broken([](auto& s) { s[0][0].parameter = 7; }), "broken invariant.*parameter 7");
  EXPECT_DEATH(broken([](auto& s) { s[3].clear(); }), "broken invariant.*of its elements covered");
  EXPECT_DEATH(broken([](auto& s) { s.pop_back(); }), "broken invariant");
}

TEST(Shape, CountsElements) {
  EXPECT_EQ(numel({"scalar", {}}), 1);
  EXPECT_EQ(numel({"one", {1}}), 1);
  EXPECT_EQ(numel({"matrix", {3, 5}}), 15);
  EXPECT_EQ(numel({"empty", {0, 4}}), 0);
  EXPECT_EQ(numel({"empty", {kMax, kMax, 0}}), 0);  // no overflow: nothing is there
  EXPECT_EQ(numel({"largest", {kMax}}), kMax);
  EXPECT_THROW(static_cast<void>(numel({"past", {kMax, 2}})), UsageError);
}

TEST(Shape, PrintsNameAndSizes) {
  EXPECT_EQ(to_string(Shape{"name", {2, 3}}), "name[2, 3]");
  EXPECT_EQ(to_string(Shape{"scalar", {}}), "scalar[]");
}

}  // namespace
}  // namespace fsdpp::layout
