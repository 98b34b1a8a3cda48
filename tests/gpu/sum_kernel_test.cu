// The sum of ranks' gradients on the GPU: the same bits as on the host.
#include <cuda_fp16.h>

#include <array>
#include <limits>
#include <memory>
#include <type_traits>

#include "fsdpp/base/error.h"
#include "fsdpp/device/cuda_sum.h"
#include "fsdpp/device/sum.h"
#include "tests/gpu/device_memory.cuh"

namespace fsdpp::gpu_test {
namespace {

using device::Element;

constexpr std::array<int64_t, 11> kCounts = {0, 1, 2, 3, 4, 5, 7, 1023, 4096, 12'301, 270'337};

struct Case {
  int sources;
  Element wire;
  bool add;
  int64_t count;
  int64_t out_offset;     // elements by which `out` misses 256 bytes
  int64_t source_offset;  // the same of the sources
};

constexpr std::array<Element, 4> kWires = {Element::fp32, Element::bf16, Element::fp16, Element::fp64};

// Random numbers stored as `wire`.
template <class Stored>
std::vector<Stored> random_stored(int64_t count, Element wire) {
  std::vector<Stored> result;
  for (const float value : random_floats(count)) {
    if constexpr (std::is_same_v<Stored, uint16_t>) {
      result.push_back(wire == Element::bf16 ? to_bf16(value) : __half_as_ushort(__float2half(value)));
    } else {
      result.push_back(value / Stored{3});
    }
  }
  return result;
}

// Sums on GPU and host from the same random numbers; false and a failure if the bits differ.
template <class Stored, class Sum>
void check_stored(const Case& c) {
  std::vector<std::vector<Stored>> values;
  std::vector<std::unique_ptr<Memory<Stored>>> memory;
  std::vector<const void*> sources;
  std::vector<const void*> host;
  for (int s = 0; s < c.sources; ++s) {
    values.push_back(random_stored<Stored>(c.count, c.wire));
    memory.push_back(std::make_unique<Memory<Stored>>(values[s], c.source_offset));
    sources.push_back(memory[s]->data());
  }
  for (const auto& value : values) host.push_back(value.data());
  Memory<Sum> out(c.count, c.out_offset);
  std::vector<Sum> expected = out.download();  // NaNs
  if (c.add) out.upload(expected = random_stored<Sum>(c.count, device::sum_element(c.wire)));
  const double scale = 1.0 / 3;
  device::sum_in_rank_order(expected.data(), host, c.wire, c.count, scale, c.add);
  device::cuda_sum_in_rank_order(nullptr, out.data(), sources, c.wire, c.count, scale, c.add);
  EXPECT_EQ(first_difference(out.download(), expected), -1);
  EXPECT_TRUE(out.guards_intact());
}

void check(const Case& c) {
  SCOPED_TRACE(text("sources ", c.sources, ", ", to_string(c.wire), ", add ", c.add, ", count ", c.count,
                    ", offsets ", c.out_offset, " ", c.source_offset));
  switch (c.wire) {
    case Element::fp32:
      return check_stored<float, float>(c);
    case Element::fp64:
      return check_stored<double, double>(c);
    case Element::bf16:
    case Element::fp16:
      return check_stored<uint16_t, float>(c);
  }
}

TEST(SumKernel, HasTheHostsBitsForAnyNumberOfSources) {
  FSDPP_NEED_GPU();
  for (int sources = 0; sources <= device::kMaxSumSources; ++sources) {
    for (const Element wire : kWires) {
      for (const bool add : {false, true}) check({sources, wire, add, 12'301, 0, 0});
    }
  }
}

TEST(SumKernel, HasTheHostsBitsForAnyCountAndPlace) {
  FSDPP_NEED_GPU();
  for (const int64_t count : kCounts) {
    for (int64_t offset = 0; offset < 4; ++offset) {
      for (const Element wire : kWires) {
        check({2, wire, offset % 2 == 0, count, offset, offset});      // the same place within 16 bytes
        check({5, wire, offset % 2 == 1, count, offset, 3 - offset});  // different places
      }
    }
  }
}

TEST(SumKernel, OutMayBeAnySourceWhenNotAdding) {
  FSDPP_NEED_GPU();
  constexpr int64_t kCount = 70'003;
  for (const int sources : {1, 2, 3, 4, 7}) {
    for (int in_place = 0; in_place < sources; ++in_place) {
      std::vector<std::vector<float>> values;
      std::vector<std::unique_ptr<Memory<float>>> memory;
      std::vector<const void*> pointers;
      std::vector<const float*> host;
      for (int s = 0; s < sources; ++s) {
        values.push_back(random_floats(kCount));
        memory.push_back(std::make_unique<Memory<float>>(values[s], 1));
        pointers.push_back(memory[s]->data());
      }
      for (const auto& value : values) host.push_back(value.data());
      std::vector<float> expected(kCount);
      device::sum_in_rank_order(expected.data(), host, kCount, 0.5F, false);
      device::cuda_sum_in_rank_order(nullptr, memory[in_place]->data(), pointers, Element::fp32, kCount, 0.5F,
                                     false);
      EXPECT_EQ(first_difference(memory[in_place]->download(), expected), -1) << sources << " " << in_place;
    }
  }
}

TEST(SumKernel, KeepsInfinitiesNansZerosAndSubnormals) {
  FSDPP_NEED_GPU();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kTiny = std::numeric_limits<float>::denorm_min();
  const std::vector<float> a = {
      kInfinity, kInfinity, -0.0F, 3 * kTiny, NAN, 1, std::numeric_limits<float>::max(), 0};
  const std::vector<float> b = {-kInfinity, 1, -0.0F, 2 * kTiny, 1, NAN, std::numeric_limits<float>::max(),
                                -0.0F};
  const Memory<float> first(a);
  const Memory<float> second(b);
  Memory<float> out(8);
  std::vector<float> expected(8);
  device::sum_in_rank_order(expected.data(), std::array{a.data(), b.data()}, 8, 1.0F, false);
  device::cuda_sum_in_rank_order(nullptr, out.data(), std::array<const void*, 2>{first.data(), second.data()},
                                 Element::fp32, 8, 1.0F, false);
  EXPECT_EQ(first_difference(out.download(), expected), -1);
  EXPECT_TRUE(std::isnan(expected[0]) && std::isnan(expected[4]) && std::isnan(expected[5]));
}

TEST(SumKernel, RefusesWhatItCannotDo) {
  FSDPP_NEED_GPU();
  Memory<float> out(8);
  const std::vector<const void*> many(device::kMaxSumSources + 1, out.data());
  EXPECT_THROW(device::cuda_sum_in_rank_order(nullptr, out.data(), many, Element::fp32, 8, 1, false),
               UsageError);
  EXPECT_THROW(device::cuda_sum_in_rank_order(nullptr, out.data(), {}, Element::fp32, -1, 1, false),
               UsageError);
}

}  // namespace
}  // namespace fsdpp::gpu_test
