// Norms and the clipping factor on the GPU.
#include <limits>
#include <memory>

#include "fsdpp/base/error.h"
#include "fsdpp/device/cuda_norm.h"
#include "tests/gpu/device_memory.cuh"

namespace fsdpp::gpu_test {
namespace {

using device::NormRun;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kSizes[] = {0, 1, 3, 4, 4097, 0, 500'001, 16'384, 7};

std::vector<std::vector<float>> random_runs() {
  std::vector<std::vector<float>> values;
  for (const int64_t size : kSizes) values.push_back(random_floats(size));
  return values;
}

// The part by the kernel, twice; the two must have the same bits.
double part_of(const std::vector<std::vector<float>>& values, double norm_type) {
  std::vector<std::unique_ptr<Memory<float>>> memory;
  std::vector<NormRun> table;
  for (std::size_t r = 0; r < values.size(); ++r) {
    memory.push_back(std::make_unique<Memory<float>>(values[r], static_cast<int64_t>(r % 4)));
    table.push_back({memory[r]->data(), memory[r]->size(), 0});
  }
  const int64_t tiles = device::place_tiles(std::span(table));
  const Memory<NormRun> device(table);
  double results[2];
  for (double& result : results) {
    const Memory<double> workspace(device::kNormWorkspace);
    const Memory<double> part(1);
    device::cuda_norm_part(nullptr, device.data(), static_cast<int>(table.size()), tiles, norm_type,
                           workspace.data(), part.data());
    result = part.download()[0];
    EXPECT_TRUE(workspace.guards_intact() && part.guards_intact());
  }
  EXPECT_EQ(std::bit_cast<uint64_t>(results[0]), std::bit_cast<uint64_t>(results[1]));
  return results[0];
}

double part_on_host(const std::vector<std::vector<float>>& values, double norm_type) {
  long double total = 0;
  for (const auto& run : values) {
    for (const float x : run) {
      const double value = std::fabs(static_cast<double>(x));
      if (std::isinf(norm_type)) {
        total = std::max<long double>(total, value);
      } else {
        total += std::pow(value, norm_type);
      }
    }
  }
  return static_cast<double>(total);
}

TEST(NormKernel, AgreesWithTheHost) {
  FSDPP_NEED_GPU();
  for (const double norm_type : {2.0, 1.0, 3.0, 0.5}) {
    const auto values = random_runs();
    const double expected = part_on_host(values, norm_type);
    EXPECT_NEAR(part_of(values, norm_type), expected, 1e-12 * expected) << norm_type;
  }
  const auto values = random_runs();
  EXPECT_EQ(part_of(values, kInfinity), part_on_host(values, kInfinity));
}

TEST(NormKernel, NothingHasNormZero) {
  FSDPP_NEED_GPU();
  for (const double norm_type : {2.0, 1.0, 3.0, kInfinity}) {
    EXPECT_EQ(part_of({}, norm_type), 0.0);
    EXPECT_EQ(part_of({{}, {}}, norm_type), 0.0);
  }
}

TEST(NormKernel, NanWinsWhereverItStands) {
  FSDPP_NEED_GPU();
  for (const double norm_type : {2.0, 1.0, 3.0, kInfinity}) {
    for (int trial = 0; trial < 4; ++trial) {
      auto values = random_runs();
      values[4][static_cast<std::size_t>(random_below(4097))] = std::numeric_limits<float>::infinity();
      EXPECT_EQ(part_of(values, norm_type), kInfinity);
      values[6][static_cast<std::size_t>(random_below(500'001))] = NAN;
      EXPECT_TRUE(std::isnan(part_of(values, norm_type))) << norm_type;
    }
  }
}

struct Clipped {
  double norm;
  float factor;
};

Clipped clip(const std::vector<double>& parts, double norm_type, double max_norm) {
  const Memory<double> device(parts);
  const Memory<double> norm(1);
  const Memory<float> factor(1);
  device::cuda_clip_factor(nullptr, device.data(), static_cast<int>(parts.size()), norm_type, max_norm,
                           norm.data(), factor.data());
  return {norm.download()[0], factor.download()[0]};
}

TEST(ClipKernel, FollowsClipGradNorm) {
  FSDPP_NEED_GPU();
  EXPECT_EQ(clip({9, 16}, 2, 1).norm, 5.0);
  EXPECT_EQ(clip({9, 16}, 2, 1).factor, static_cast<float>(1 / (5 + 1e-6)));
  EXPECT_EQ(clip({9, 16}, 2, 100).factor, 1.0F);
  EXPECT_EQ(clip({9, 16}, 1, 5).factor, static_cast<float>(5 / (25 + 1e-6)));
  EXPECT_EQ(clip({9, 16, 2}, kInfinity, 4).norm, 16.0);
  EXPECT_NEAR(clip({9, 18}, 3, 1).norm, 3.0, 1e-14);
  EXPECT_EQ(clip({9, 16}, 2, 0).factor, 0.0F);
  EXPECT_EQ(clip({0}, 2, 1).factor, 1.0F);
  EXPECT_EQ(clip({kInfinity, 1}, 2, 1).factor, 0.0F);
  EXPECT_EQ(clip({1e300, 1e-300, -1e300}, 1, 1).norm, 0.0);  // in rank order
  for (const double norm_type : {1.0, 2.0, 3.0, kInfinity}) {
    EXPECT_TRUE(std::isnan(clip({1, NAN, 3}, norm_type, 1).norm)) << norm_type;
    EXPECT_TRUE(std::isnan(clip({1, NAN, 3}, norm_type, 1).factor)) << norm_type;
  }
}

TEST(ClipKernel, RefusesWrongArguments) {
  FSDPP_NEED_GPU();
  EXPECT_THROW(clip({1}, 0, 1), UsageError);
  EXPECT_THROW(clip({1}, NAN, 1), UsageError);
  EXPECT_THROW(clip({1}, 2, -1), UsageError);
  EXPECT_THROW(part_of({}, -1), UsageError);
}

}  // namespace
}  // namespace fsdpp::gpu_test
