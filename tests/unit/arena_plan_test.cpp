#include "fsdpp/layout/arena_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "fsdpp/base/error.h"

// A corrupted plan cannot be built through the interface, so the test of check() reaches the member itself:
// the standard lets an explicit instantiation name a private member.
template <auto Member>
struct OpenArenaPlan {
  friend auto& arena_plan_offsets(fsdpp::layout::ArenaPlan& plan) { return plan.*Member; }
};
auto& arena_plan_offsets(fsdpp::layout::ArenaPlan& plan);
template struct OpenArenaPlan<&fsdpp::layout::ArenaPlan::offsets_>;

namespace fsdpp::layout {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

bool alive(const PlannedBuffer& buffer, int64_t step) {
  return std::any_of(buffer.lifetimes.begin(), buffer.lifetimes.end(),
                     [&](const Lifetime& life) { return life.first <= step && step <= life.last; });
}

// Step by step, by definition: what is alive at `step` is disjoint and inside the arena; the peak is the
// bound.
void check_promises(const std::vector<PlannedBuffer>& buffers, int64_t steps, const ArenaPlan& plan) {
  const int count = static_cast<int>(buffers.size());
  ASSERT_EQ(plan.buffers().size(), buffers.size());
  int64_t end = 0;
  for (int i = 0; i < count; ++i) {
    ASSERT_EQ(plan.buffers()[i].name, buffers[i].name);
    ASSERT_EQ(plan.offset(i) % 256, 0);
    ASSERT_GE(plan.offset(i), 0);
    end = std::max(end, plan.offset(i) + aligned(buffers[i].bytes));
  }
  ASSERT_EQ(plan.bytes(), end);
  int64_t most = 0;
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<std::pair<int64_t, int64_t>> ranges;
    int64_t sum = 0;
    for (int i = 0; i < count; ++i) {
      if (!alive(buffers[i], step) || buffers[i].bytes == 0) continue;
      ranges.emplace_back(plan.offset(i), plan.offset(i) + buffers[i].bytes);
      sum += aligned(buffers[i].bytes);
    }
    std::sort(ranges.begin(), ranges.end());
    for (size_t i = 1; i < ranges.size(); ++i)
      ASSERT_LE(ranges[i - 1].second, ranges[i].first) << "step " << step;
    most = std::max(most, sum);
  }
  ASSERT_EQ(plan.lower_bound_bytes(), most);
}

std::vector<PlannedBuffer> random_buffers(std::mt19937_64& random, int64_t steps) {
  std::vector<PlannedBuffer> buffers(random() % 16);
  for (size_t i = 0; i < buffers.size(); ++i) {
    buffers[i].name = "b" + std::to_string(i);
    buffers[i].bytes = static_cast<int64_t>(random() % 8 == 0 ? 0 : random() % 3000);
    for (uint64_t k = random() % 4; k > 0; --k) {  // lives of one buffer may meet, touch, or be out of order
      const auto first = static_cast<int64_t>(random() % steps);
      const auto length = static_cast<int64_t>(random() % 6);
      buffers[i].lifetimes.push_back({first, std::min(first + length, steps - 1)});
    }
  }
  return buffers;
}

TEST(ArenaPlan, RandomBuffersKeepEveryPromise) {
  constexpr int64_t kSteps = 24;
  for (uint64_t seed = 1; seed <= 20000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const std::vector<PlannedBuffer> buffers = random_buffers(random, kSteps);
    const ArenaPlan plan = ArenaPlan::build(buffers);
    check_promises(buffers, kSteps, plan);
    const ArenaPlan again = ArenaPlan::build(buffers);
    for (int i = 0; i < static_cast<int>(buffers.size()); ++i) {
      ASSERT_EQ(plan.offset(i), again.offset(i));
      for (int j = 0; j < static_cast<int>(buffers.size()); ++j) {
        const bool share = buffers[i].bytes > 0 && buffers[j].bytes > 0 &&
                           std::max(plan.offset(i), plan.offset(j)) <
                               std::min(plan.offset(i) + buffers[i].bytes, plan.offset(j) + buffers[j].bytes);
        ASSERT_EQ(plan.share_bytes(i, j), share);
      }
    }
    if (HasFatalFailure()) return;
  }
}

// The lowest aligned offset where `buffer` is free of what is placed, found by trying every one.
int64_t lowest_by_trying(const ArenaPlan& plan, const std::vector<int>& placed, int buffer) {
  const std::span<const PlannedBuffer> all = plan.buffers();
  for (int64_t offset = 0;; offset += 256) {
    const bool free = std::none_of(placed.begin(), placed.end(), [&](int other) {
      const bool meets =
          std::any_of(all[buffer].lifetimes.begin(), all[buffer].lifetimes.end(), [&](const Lifetime& life) {
            for (int64_t step = life.first; step <= life.last; ++step) {
              if (alive(all[other], step)) return true;
            }
            return false;
          });
      return meets && offset < plan.offset(other) + aligned(all[other].bytes) &&
             plan.offset(other) < offset + aligned(all[buffer].bytes);
    });
    if (free) return offset;
  }
}

TEST(ArenaPlan, EachBufferLiesAtTheLowestFreeOffset) {
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const ArenaPlan plan = ArenaPlan::build(random_buffers(random, 24));
    const std::span<const PlannedBuffer> all = plan.buffers();
    std::vector<int> order(all.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    std::sort(order.begin(), order.end(), [&](int a, int b) {
      const int64_t size_a = aligned(all[a].bytes);
      const int64_t size_b = aligned(all[b].bytes);
      return size_a != size_b ? size_a > size_b : a < b;
    });
    std::vector<int> placed;
    for (const int i : order) {
      ASSERT_EQ(plan.offset(i), lowest_by_trying(plan, placed, i)) << all[i].name;
      placed.push_back(i);
    }
  }
}

// Units run one after another and back; each is fetched one step before its own, in both directions.
std::vector<PlannedBuffer> chain(const std::vector<int64_t>& bytes) {
  const auto units = static_cast<int64_t>(bytes.size());
  std::vector<PlannedBuffer> buffers;
  for (int64_t i = 0; i < units; ++i) {
    const int64_t back = 2 * units - 1 - i;
    buffers.push_back(
        {"unit" + std::to_string(i), bytes[i], {{std::max<int64_t>(i - 1, 0), i}, {back - 1, back}}});
  }
  return buffers;
}

TEST(ArenaPlan, ChainOfEqualUnitsNeedsTwo) {
  for (const int units : {2, 3, 4, 7, 32, 61}) {
    for (const int64_t bytes : {256, 1000, 1 << 20}) {
      const std::vector<PlannedBuffer> buffers = chain(std::vector<int64_t>(units, bytes));
      const ArenaPlan plan = ArenaPlan::build(buffers);
      check_promises(buffers, 2 * units, plan);
      EXPECT_EQ(plan.bytes(), 2 * aligned(bytes)) << units << " units";
      EXPECT_EQ(plan.lower_bound_bytes(), 2 * aligned(bytes));
      if (units > 2) {
        EXPECT_TRUE(plan.share_bytes(0, 2));
        EXPECT_FALSE(plan.share_bytes(0, 1));
      }
    }
  }
  EXPECT_EQ(ArenaPlan::build(chain({1000})).bytes(), 1024);
}

TEST(ArenaPlan, LongLivedBufferAmongAChainCostsItselfOnly) {
  constexpr int kUnits = 12;
  for (const int64_t tied : {100, 4096, 8192, 50000}) {  // smaller than a unit, equal, and larger
    for (const int position : {0, 5, kUnits}) {
      std::vector<PlannedBuffer> buffers = chain(std::vector<int64_t>(kUnits, 4096));
      buffers.insert(buffers.begin() + position, {"tied", tied, {{0, 2 * kUnits - 1}}});
      const ArenaPlan plan = ArenaPlan::build(buffers);
      check_promises(buffers, 2 * kUnits, plan);
      EXPECT_EQ(plan.bytes(), 2 * 4096 + aligned(tied)) << tied << " bytes at " << position;
      for (int i = 0; i <= kUnits; ++i) EXPECT_EQ(plan.share_bytes(position, i), i == position);
    }
  }
}

TEST(ArenaPlan, BufferAtBothEndsOfAChainKeepsItsOffset) {
  // An untied embedding and head around equal blocks; the embedding lives at the first and at the last steps.
  std::vector<int64_t> bytes(10, 4096);
  bytes.front() = bytes.back() = 10000;
  const ArenaPlan plan = ArenaPlan::build(chain(bytes));
  EXPECT_EQ(plan.offset(0), 0);
  EXPECT_EQ(plan.bytes(), plan.lower_bound_bytes());
  EXPECT_TRUE(plan.share_bytes(0, 9));
}

TEST(ArenaPlan, ChainsOfUnequalUnitsStayWithinHalfMoreThanTheBound) {
  // Proof of the factor: a unit meets its two neighbours alone. Placed behind both it is the smallest of the
  // three, so at most half the bound, and each neighbour was placed behind at most one unit, so within the
  // bound.
  double worst = 1.0;
  double sum = 0.0;
  constexpr int kChains = 4000;
  for (uint64_t seed = 1; seed <= kChains; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::vector<int64_t> bytes(2 + random() % 20);
    for (int64_t& size : bytes)
      size = 1 + static_cast<int64_t>(random() % (random() % 4 == 0 ? 60000 : 6000));
    const std::vector<PlannedBuffer> buffers = chain(bytes);
    const ArenaPlan plan = ArenaPlan::build(buffers);
    check_promises(buffers, 2 * static_cast<int64_t>(bytes.size()), plan);
    if (HasFatalFailure()) return;
    ASSERT_LE(2 * plan.bytes(), 3 * plan.lower_bound_bytes());
    const double factor = static_cast<double>(plan.bytes()) / static_cast<double>(plan.lower_bound_bytes());
    worst = std::max(worst, factor);
    sum += factor;
  }
  EXPECT_LE(sum / kChains, 1.05) << "the mean over the bound; the worst was " << worst;
}

TEST(ArenaPlan, EmptyAndUnusedBuffers) {
  const ArenaPlan none = ArenaPlan::build({});
  EXPECT_EQ(none.bytes(), 0);
  EXPECT_EQ(none.lower_bound_bytes(), 0);
  EXPECT_TRUE(none.buffers().empty());

  const ArenaPlan plan =
      ArenaPlan::build({{"used", 10, {{3, 3}}}, {"unused", 1000, {}}, {"empty", 0, {{0, 9}}}});
  EXPECT_EQ(plan.bytes(), 1024);  // the unused one is placed too, over the other
  EXPECT_EQ(plan.lower_bound_bytes(), 256);
  EXPECT_TRUE(plan.share_bytes(0, 1));
  EXPECT_FALSE(plan.share_bytes(0, 2));
  EXPECT_FALSE(plan.share_bytes(2, 2));
}

TEST(ArenaPlan, LifetimesIncludeBothSteps) {
  EXPECT_FALSE(ArenaPlan::build({{"a", 1, {{0, 5}}}, {"b", 1, {{5, 6}}}}).share_bytes(0, 1));
  EXPECT_TRUE(ArenaPlan::build({{"a", 1, {{0, 5}}}, {"b", 1, {{6, 6}}}}).share_bytes(0, 1));
  const ArenaPlan ends = ArenaPlan::build({{"a", 1, {{kMin, kMax}}}, {"b", 1, {{kMax, kMax}, {kMin, kMin}}}});
  EXPECT_FALSE(ends.share_bytes(0, 1));
  EXPECT_EQ(ends.lower_bound_bytes(), 512);
  // Lives of one buffer that meet count once.
  EXPECT_EQ(ArenaPlan::build({{"a", 1, {{4, 9}, {0, 5}, {2, 3}}}}).lower_bound_bytes(), 256);
}

// The message of the UsageError that build throws; empty when the buffers are accepted.
std::string rejection(std::vector<PlannedBuffer> buffers) {
  try {
    static_cast<void>(ArenaPlan::build(std::move(buffers)));
    return "";
  } catch (const UsageError& error) {
    return error.what();
  }
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(ArenaPlan, IllegalBuffersAreRejectedByName) {
  const PlannedBuffer fine = {"fine", 100, {{0, 1}}};
  EXPECT_TRUE(contains(rejection({fine, {"minus", -1, {}}}), "buffer 'minus' has -1 bytes"));
  EXPECT_TRUE(contains(rejection({fine, {"minus", kMin, {}}}), "buffer 'minus'"));
  EXPECT_TRUE(contains(rejection({fine, {"back", 1, {{0, 2}, {7, 6}}}}),
                       "buffer 'back' lives from step 7 to step 6"));
  EXPECT_TRUE(contains(rejection({fine, {"huge", kMax, {}}}), "buffer 'huge'"));
  EXPECT_TRUE(contains(rejection({{"half", kMax / 2, {}}, fine, {"more", kMax / 2, {}}}), "buffer 'more'"));
  EXPECT_EQ(rejection({{"most", kMax - 511, {{0, 1}}}, {"empty", 0, {{0, 1}}}}), "");
}

TEST(ArenaPlan, UnknownIndicesThrow) {
  const ArenaPlan plan = ArenaPlan::build({{"a", 1, {}}});
  EXPECT_THROW(static_cast<void>(plan.offset(-1)), std::out_of_range);
  EXPECT_THROW(static_cast<void>(plan.offset(1)), std::out_of_range);
  EXPECT_THROW(static_cast<void>(plan.share_bytes(0, 1)), std::out_of_range);
  EXPECT_THROW(static_cast<void>(plan.share_bytes(-1, 0)), std::out_of_range);
}

TEST(ArenaPlanDeathTest, CheckAbortsOnABrokenPlan) {
  ArenaPlan plan = ArenaPlan::build(chain({1000, 1000, 1000}));
  plan.check();
  const auto moved = [&](int buffer, int64_t offset) {
    ArenaPlan broken = plan;
    arena_plan_offsets(broken)[buffer] = offset;
    broken.check();
  };
  EXPECT_DEATH(moved(1, 0), "broken invariant.*'unit1' and 'unit0' share bytes");
  EXPECT_DEATH(moved(0, 8), "broken invariant.*'unit0' at 8");
  EXPECT_DEATH(moved(2, -256), "broken invariant.*'unit2' at -256");
  EXPECT_DEATH(moved(1, 1 << 20), "broken invariant.*'unit1' at 1048576");
}

}  // namespace
}  // namespace fsdpp::layout
