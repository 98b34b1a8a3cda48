// The pair of bf16 and remainder that stands for an fp32 weight.
#include "fsdpp/device/split_weight.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace fsdpp::device {
namespace {

float published(SplitWeight weight) {
  return std::bit_cast<float>(static_cast<uint32_t>(weight.model) << 16);
}

// Every `step`th of all fp32 values, and each one's neighbours around the next tie.
template <class Body>
void for_many_values(Body body) {
  constexpr uint64_t kStep = 251;  // prime: all low halves occur
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += kStep) {
    body(static_cast<uint32_t>(bits));
    if (bits % 64 == 0) {
      const uint32_t tie = (static_cast<uint32_t>(bits) & 0xffff0000U) | 0x8000U;
      for (uint32_t near = tie - 2; near != tie + 3; ++near) body(near);
    }
  }
}

TEST(SplitWeight, RestoresEveryValueThatIsNotANan) {
  uint64_t wrong = 0;
  uint64_t values = 0;
  for_many_values([&](uint32_t bits) {
    if (std::isnan(std::bit_cast<float>(bits))) return;
    ++values;
    wrong += join_bits(split_bits(bits)) != bits ? 1 : 0;
  });
  EXPECT_EQ(wrong, 0U);
  EXPECT_GT(values, 17'000'000U);
}

TEST(SplitWeight, PublishesTheNearestBf16) {
  uint64_t wrong = 0;
  for_many_values([&](uint32_t bits) {
    const auto weight = std::bit_cast<float>(bits);
    if (!(std::fabs(weight) <= 0x1.fep127F)) return;  // beyond it the nearest is infinity
    const SplitWeight split = split_bits(bits);
    const double distance = std::fabs(static_cast<double>(published(split)) - weight);
    for (const int other : {-1, 1}) {
      const auto model = static_cast<uint16_t>(split.model + other);
      const double other_distance = std::fabs(static_cast<double>(published({model, 0})) - weight);
      wrong += other_distance < distance ? 1 : 0;  // NaN where there is no neighbour: not nearer
    }
  });
  EXPECT_EQ(wrong, 0U);
}

TEST(SplitWeight, CarriesGoIntoTheExponent) {
  const float below_two = std::bit_cast<float>(0x3fffffffU);
  EXPECT_EQ(published(split_weight(below_two)), 2.0F);
  EXPECT_EQ(join_weight(split_weight(below_two)), below_two);
  const float largest = std::numeric_limits<float>::max();
  EXPECT_TRUE(std::isinf(published(split_weight(largest))));
  EXPECT_EQ(join_weight(split_weight(largest)), largest);
  EXPECT_EQ(join_weight(split_weight(-largest)), -largest);
}

TEST(SplitWeight, TiesGoAwayFromZero) {
  const float tie = std::bit_cast<float>(0x3f808000U);  // halfway between 1 and the next bf16
  EXPECT_EQ(split_weight(tie).model, 0x3f81);
  EXPECT_EQ(split_weight(-tie).model, 0xbf81);
  EXPECT_EQ(join_weight(split_weight(-tie)), -tie);
}

TEST(SplitWeight, NansZerosAndInfinitiesStayWhatTheyAre) {
  for (const uint32_t bits : {0x7f800001U, 0x7fffffffU, 0x7fff8000U, 0xff800001U, 0xffffffffU}) {
    const SplitWeight split = split_bits(bits);
    EXPECT_TRUE(std::isnan(published(split))) << bits;
    EXPECT_TRUE(std::isnan(join_weight(split))) << bits;
    EXPECT_EQ(split.model & 0x8000U, bits >> 16 & 0x8000U) << bits;
  }
  for (const uint32_t bits : {0U, 0x80000000U, 0x7f800000U, 0xff800000U}) {
    EXPECT_EQ(split_bits(bits).remainder, 0) << bits;
    EXPECT_EQ(join_bits(split_bits(bits)), bits);
  }
}

}  // namespace
}  // namespace fsdpp::device
