#include "fsdpp/data/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/data/permutation.h"
#include "tests/unit/data_files.h"

namespace fsdpp::data {
namespace {

/// Tokens whose value tells their position (below 2^16).
std::vector<Token> counting(size_t count) {
  std::vector<Token> tokens(count);
  std::iota(tokens.begin(), tokens.end(), Token{0});
  return tokens;
}

std::vector<int64_t> values(const at::Tensor& tensor) {
  EXPECT_TRUE(tensor.is_contiguous());
  const auto* data = tensor.const_data_ptr<int64_t>();
  return {data, data + tensor.numel()};
}

std::vector<int64_t> order_of(int64_t size, uint64_t key) {
  const Permutation permutation(size, key);
  std::vector<int64_t> order;
  for (int64_t i = 0; i < size; ++i) order.push_back(permutation(i));
  return order;
}

TEST(Permutation, IsABijectionOfEverySize) {
  std::vector<int64_t> sizes(600);
  std::iota(sizes.begin(), sizes.end(), 1);
  for (const int64_t more : {1023, 1024, 1025, 4095, 4096, 4097, 65535, 65536, 65537, 100003}) {
    sizes.push_back(more);
  }
  for (const int64_t size : sizes) {
    for (const uint64_t key : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
      std::vector<int64_t> order = order_of(size, key);
      std::sort(order.begin(), order.end());
      for (int64_t i = 0; i < size; ++i) ASSERT_EQ(order[static_cast<size_t>(i)], i) << size << " " << key;
    }
  }
}

TEST(Permutation, LargeSizesStayInRangeAndDoNotRepeat) {
  for (const int64_t size : {(int64_t{1} << 40) + 1, int64_t{1} << 62}) {
    const Permutation permutation(size, 7);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < 1000; ++i) {
      const int64_t value = permutation(size - 1 - i);
      ASSERT_TRUE(value >= 0 && value < size);
      seen.insert(value);
    }
    EXPECT_EQ(seen.size(), 1000U);
  }
}

TEST(Permutation, KeysGiveAllOrdersOfAFewNumbersAboutEvenly) {
  std::map<std::vector<int64_t>, int> counts;
  constexpr int kKeys = 24000;
  for (int key = 0; key < kKeys; ++key) ++counts[order_of(4, static_cast<uint64_t>(key))];
  ASSERT_EQ(counts.size(), 24U);
  const int expected = kKeys / static_cast<int>(counts.size());
  for (const auto& [order, count] : counts) {
    EXPECT_GT(count, expected / 2);
    EXPECT_LT(count, expected * 2);
  }
}

TEST(Permutation, LooksRandom) {
  constexpr int64_t kSize = 10000;
  const std::vector<int64_t> order = order_of(kSize, 3);
  int64_t fixed = 0;
  int64_t neighbours = 0;
  int64_t ascents = 0;
  for (int64_t i = 0; i < kSize; ++i) {
    const auto at = static_cast<size_t>(i);
    fixed += order[at] == i ? 1 : 0;
    if (i == 0) continue;
    neighbours += std::abs(order[at] - order[at - 1]) == 1 ? 1 : 0;
    ascents += order[at] > order[at - 1] ? 1 : 0;
  }
  EXPECT_LT(fixed, 10);                  // 1 expected
  EXPECT_LT(neighbours, 15);             // 2 expected
  EXPECT_NEAR(ascents, kSize / 2, 150);  // deviation sqrt(size / 12) = 29
}

TEST(Permutation, RejectsWhatIsOutOfRange) {
  EXPECT_THROW(Permutation(0, 1), UsageError);
  EXPECT_THROW((void)Permutation(5, 1)(5), std::out_of_range);
  EXPECT_THROW((void)Permutation(5, 1)(-1), std::out_of_range);
}

TEST(Sampler, AnEpochVisitsEachWindowOnce) {
  for (const size_t count : {9U, 10U, 15U, 16U, 17U, 100U, 1000U, 4097U}) {
    for (const int64_t sequence : {1, 3, 8}) {
      const std::vector<Token> tokens = counting(count);
      const Sampler sampler(tokens, sequence, 1, 5);
      const int64_t size = sampler.epoch_windows();
      EXPECT_GT(size * sequence, static_cast<int64_t>(count) - 2 * sequence);  // little is left out
      for (int64_t epoch = 0; epoch < 5; ++epoch) {
        std::vector<int64_t> starts;
        for (int64_t i = 0; i < size; ++i) starts.push_back(sampler.windows(epoch * size + i).at(0));
        std::sort(starts.begin(), starts.end());
        EXPECT_GE(starts.front(), 0);
        EXPECT_LT(starts.front(), sequence);
        EXPECT_LT(starts.back() + sequence, static_cast<int64_t>(count)) << "last target";
        for (size_t i = 1; i < starts.size(); ++i) ASSERT_EQ(starts[i] - starts[i - 1], sequence);
      }
    }
  }
}

TEST(Sampler, EpochsDifferInOrderAndShift) {
  const std::vector<Token> tokens = counting(6400);
  const Sampler sampler(tokens, 16, 1, 5);
  const int64_t size = sampler.epoch_windows();
  std::set<std::vector<int64_t>> orders;
  std::set<int64_t> shifts;
  for (int64_t epoch = 0; epoch < 40; ++epoch) {
    std::vector<int64_t> order;
    for (int64_t i = 0; i < size; ++i) order.push_back(sampler.windows(epoch * size + i).at(0));
    shifts.insert(order.front() % 16);
    for (int64_t& start : order) start /= 16;
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 40U);
  EXPECT_GE(shifts.size(), 10U);  // 14.8 of 16 expected in 40 draws
}

TEST(Sampler, BatchesDoNotDependOnTheWorld) {
  const std::vector<Token> tokens = counting(5000);
  constexpr int64_t kBatch = 48;
  const Sampler sampler(tokens, 7, kBatch, 11);
  for (const int64_t step : {0, 1, 13, 14, 15, 1000}) {  // an epoch of 713 windows ends within step 14
    const std::vector<int64_t> starts = sampler.windows(step);
    ASSERT_EQ(starts.size(), static_cast<size_t>(kBatch));
    std::vector<int64_t> expected;
    for (const int64_t start : starts) {
      for (int64_t i = 0; i < 7; ++i) expected.push_back(start + i);
    }
    for (const int64_t ranks : {1, 2, 3, 4, 6, 8}) {
      for (const int64_t microbatches : {1, 2, 3}) {
        if (kBatch % (ranks * microbatches) != 0) continue;
        std::vector<int64_t> inputs;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          for (int64_t microbatch = 0; microbatch < microbatches; ++microbatch) {
            const Batch batch = sampler.batch(step, rank, ranks, microbatch, microbatches);
            ASSERT_EQ(batch.inputs.scalar_type(), at::kLong);
            ASSERT_EQ(batch.inputs.sizes(), at::IntArrayRef({kBatch / (ranks * microbatches), 7}));
            const std::vector<int64_t> part = values(batch.inputs);
            const std::vector<int64_t> targets = values(batch.targets);
            ASSERT_EQ(targets.size(), part.size());
            for (size_t i = 0; i < part.size(); ++i) ASSERT_EQ(targets[i], part[i] + 1);
            inputs.insert(inputs.end(), part.begin(), part.end());
          }
        }
        ASSERT_EQ(inputs, expected) << ranks << " ranks, " << microbatches << " microbatches, step " << step;
      }
    }
  }
}

TEST(Sampler, SeedAndStepAloneDecide) {
  const std::vector<Token> tokens = counting(3000);
  const Sampler first(tokens, 8, 16, 1);
  const Sampler same(tokens, 8, 16, 1);
  const Sampler other(tokens, 8, 16, 2);
  for (const int64_t step : {5, 0, 77, 5}) EXPECT_EQ(first.windows(step), same.windows(step));
  EXPECT_NE(first.windows(0), other.windows(0));
  EXPECT_NE(first.windows(0), first.windows(1));
}

TEST(Sampler, TheSeriesStaysWhatItIs) {
  // Checkpoints resume in the middle of the series: a change of the hash or the network must be meant.
  // The values come from a second implementation, in Python.
  const std::vector<Token> tokens = counting(1000);
  EXPECT_EQ(Sampler(tokens, 10, 6, 1234).windows(3), (std::vector<int64_t>{407, 397, 847, 867, 657, 427}));
}

TEST(Sampler, ValidationRunsFromTheStartInOrder) {
  const std::vector<Token> tokens = counting(101);
  const Sampler sampler = Sampler::validation(tokens, 10, 3);
  EXPECT_EQ(sampler.epoch_windows(), 10);
  EXPECT_EQ(sampler.full_batches(), 3);
  EXPECT_EQ(sampler.windows(0), (std::vector<int64_t>{0, 10, 20}));
  EXPECT_EQ(sampler.windows(2), (std::vector<int64_t>{60, 70, 80}));
  EXPECT_EQ(values(sampler.batch(1, 2, 3).targets),
            (std::vector<int64_t>{51, 52, 53, 54, 55, 56, 57, 58, 59, 60}));
  const Sampler repeating = Sampler::validation(tokens, 40, 4);
  EXPECT_EQ(repeating.full_batches(), 1);
  EXPECT_EQ(repeating.windows(0), (std::vector<int64_t>{0, 40, 0, 40}));
}

TEST(Sampler, NamesSequenceAndTextWhenTheTextIsTooShort) {
  const std::vector<Token> tokens = counting(10);
  EXPECT_NO_THROW(Sampler(tokens, 9, 1, 0));
  for (const bool validation : {false, true}) {
    const std::string message = message_of<UsageError>(
        [&] { validation ? (void)Sampler::validation(tokens, 10, 1) : (void)Sampler(tokens, 10, 1, 0); });
    EXPECT_NE(message.find("sequence 10"), std::string::npos) << message;
    EXPECT_NE(message.find("10 tokens"), std::string::npos) << message;
    EXPECT_NE(message.find(validation ? "validation text" : "training text"), std::string::npos) << message;
  }
  EXPECT_THROW(Sampler(std::span<const Token>(), 1, 1, 0), UsageError);
}

TEST(Sampler, RejectsWhatDoesNotDivideOrIsOutOfRange) {
  const std::vector<Token> tokens = counting(100);
  const Sampler sampler(tokens, 4, 12, 0);
  EXPECT_NO_THROW(sampler.check(4, 3));
  const std::string message = message_of<UsageError>([&] { sampler.check(4, 2); });
  for (const char* part : {"global batch 12", "4 ranks", "2 microbatches"}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  EXPECT_THROW(sampler.check(int64_t{1} << 40, int64_t{1} << 40), UsageError);
  EXPECT_THROW(sampler.check(0, 1), UsageError);
  EXPECT_THROW(sampler.check(1, 0), UsageError);
  EXPECT_THROW((void)sampler.batch(0, 5, 5), UsageError);
  EXPECT_THROW((void)sampler.batch(0, 4, 4), UsageError);
  EXPECT_THROW((void)sampler.batch(0, -1, 4), UsageError);
  EXPECT_THROW((void)sampler.batch(0, 0, 4, 3, 3), UsageError);
  EXPECT_THROW((void)sampler.windows(-1), UsageError);
  EXPECT_THROW((void)sampler.windows(std::numeric_limits<int64_t>::max()), UsageError);
  EXPECT_THROW(Sampler(tokens, 0, 1, 0), UsageError);
  EXPECT_THROW(Sampler(tokens, 1, 0, 0), UsageError);
}

}  // namespace
}  // namespace fsdpp::data
