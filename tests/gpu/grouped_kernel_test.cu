// The weight gradients of a grouped linear layer: exact for whole numbers, whatever lies around a group's
// rows.
#include <cuda_fp16.h>

#include <array>
#include <memory>
#include <numeric>

#include "fsdpp/base/error.h"
#include "fsdpp/device/cuda_grouped.h"
#include "fsdpp/device/cuda_grouped_sm90.h"
#include "tests/gpu/device_memory.cuh"

namespace fsdpp::gpu_test {
namespace {

using device::Element;

constexpr std::array<int, 8> kSizes = {0, 1, 7, 16, 63, 64, 65, 500};

struct Case {
  Element element = Element::bf16;
  int64_t m = 128;
  int64_t n = 256;
  std::vector<int> sizes;
  int64_t out_offset =
      0;  // elements by which outputs miss 256 bytes: not 0 modulo 4 asks for the plain kernel
  int64_t rows_behind = 0;  // nobody's, full of NaN
  int nan_group = -1;       // its rows are NaN
  float kept = 1;
  float scale = 1;
};

// A matrix on the device, of whole numbers from -4 to 4, and the same in fp32 on the host.
struct Matrix {
  std::vector<float> values;
  std::unique_ptr<Memory<float>> wide;
  std::unique_ptr<Memory<uint16_t>> narrow;
  [[nodiscard]] const void* data() const {
    return wide ? static_cast<const void*>(wide->data()) : static_cast<const void*>(narrow->data());
  }
};

uint16_t to_narrow(float value, Element element) {
  if (element == Element::bf16) return to_bf16(value);
  return std::bit_cast<uint16_t>(static_cast<__half_raw>(__float2half_rn(value)).x);
}

Matrix upload(std::vector<float> values, Element element) {
  Matrix matrix;
  if (element == Element::fp32) {
    matrix.wide = std::make_unique<Memory<float>>(values);
  } else {
    std::vector<uint16_t> narrow;
    for (const float value : values) narrow.push_back(to_narrow(value, element));
    matrix.narrow = std::make_unique<Memory<uint16_t>>(narrow);
  }
  matrix.values = std::move(values);
  return matrix;
}

std::vector<float> whole_numbers(int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = static_cast<float>(random_below(9) - 4);
  return values;
}

std::vector<int32_t> ends_of(const std::vector<int>& sizes) {
  std::vector<int32_t> ends(sizes.size());
  std::partial_sum(sizes.begin(), sizes.end(), ends.begin());
  return ends;
}

std::vector<int> random_sizes(int count) {
  std::vector<int> sizes(static_cast<std::size_t>(count));
  for (int& size : sizes) size = kSizes[random_below(kSizes.size())];
  return sizes;
}

// Inputs, outputs and what is expected of them.
struct Problem {
  explicit Problem(const Case& given) : c(given), ends(ends_of(given.sizes)), offsets(ends) {
    rows = ends.back() + c.rows_behind;
    left = upload(with_nans(whole_numbers(rows * c.m), c.m), c.element);
    right = upload(with_nans(whole_numbers(rows * c.n), c.n), c.element);
    for (std::size_t g = 0; g < ends.size(); ++g) {
      add.push_back(random_below(2) != 0);
      outputs.push_back(std::make_unique<Memory<float>>(c.m * c.n, c.out_offset));
      pointers.push_back(outputs.back()->data());
      before.push_back(add.back() != 0 ? whole_numbers(c.m * c.n) : std::vector<float>{});
      reset(static_cast<int>(g));
    }
  }

  std::vector<float> with_nans(std::vector<float> values, int64_t columns) const {
    const auto fill = [&](int64_t first, int64_t last) {
      std::fill(values.begin() + first * columns, values.begin() + last * columns, NAN);
    };
    fill(ends.back(), rows);
    if (c.nan_group >= 0) fill(c.nan_group > 0 ? ends[c.nan_group - 1] : 0, ends[c.nan_group]);
    return values;
  }

  // NaN where the old numbers must not be read.
  void reset(int g) {
    outputs[g]->poison();
    if (add[g] != 0) outputs[g]->upload(before[g]);
  }

  [[nodiscard]] device::GroupedProduct product() const {
    return {.left = left.data(),
            .right = right.data(),
            .element = c.element,
            .offsets = offsets.data(),
            .groups = static_cast<int>(ends.size()),
            .rows = rows,
            .m = c.m,
            .n = c.n,
            .kept = c.kept,
            .scale = c.scale};
  }

  [[nodiscard]] std::vector<float> expected(int g) const {
    std::vector<float> out(static_cast<std::size_t>(c.m * c.n));
    for (int64_t row = g > 0 ? ends[g - 1] : 0; row < ends[g]; ++row) {
      const float* const right_row = right.values.data() + row * c.n;
      for (int64_t i = 0; i < c.m; ++i) {
        const float factor = left.values[static_cast<std::size_t>(row * c.m + i)];
        for (int64_t j = 0; j < c.n; ++j) out[static_cast<std::size_t>(i * c.n + j)] += factor * right_row[j];
      }
    }
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = c.scale * out[i] + (add[g] != 0 ? c.kept * before[g][i] : 0.0F);
    return out;
  }

  Case c;
  std::vector<int32_t> ends;
  Memory<int32_t> offsets;
  int64_t rows = 0;
  Matrix left;
  Matrix right;
  std::vector<uint8_t> add;
  std::vector<std::unique_ptr<Memory<float>>> outputs;
  std::vector<float*> pointers;
  std::vector<std::vector<float>> before;
};

void expect_right(const Problem& problem) {
  for (std::size_t g = 0; g < problem.ends.size(); ++g) {
    EXPECT_EQ(first_difference(problem.outputs[g]->download(), problem.expected(static_cast<int>(g))), -1)
        << "group " << g << " of " << problem.ends.size() << ", rows " << problem.c.sizes[g] << ", add "
        << int{problem.add[g]};
    EXPECT_TRUE(problem.outputs[g]->guards_intact()) << g;
  }
}

void check(const Case& c) {
  SCOPED_TRACE(text("element ", static_cast<int>(c.element), ", m ", c.m, ", n ", c.n, ", groups ",
                    c.sizes.size(), ", offset ", c.out_offset));
  const Problem problem(c);
  device::cuda_grouped_products(nullptr, problem.product(), problem.pointers, problem.add);
  expect_right(problem);
}

// Shapes for the tensor cores (tiles of 128 x 256, in pairs) and for the plain kernel.
constexpr std::array<std::array<int64_t, 2>, 9> kShapes = {
    {{8, 8}, {128, 256}, {136, 264}, {264, 520}, {640, 72}, {1, 1}, {63, 65}, {100, 129}, {132, 256}}};

TEST(GroupedKernel, IsExactForWholeNumbersOfEveryShape) {
  FSDPP_NEED_GPU();
  for (const auto& [m, n] : kShapes) {
    for (const Element element : {Element::bf16, Element::fp16, Element::fp32}) {
      for (const int64_t offset : {0, 1})
        check({.element = element, .m = m, .n = n, .sizes = random_sizes(6), .out_offset = offset});
    }
  }
}

TEST(GroupedKernel, TakesEmptyGroupsAnywhere) {
  FSDPP_NEED_GPU();
  for (const std::vector<int>& sizes : std::vector<std::vector<int>>{
           {0, 5, 70}, {70, 0, 0, 9}, {64, 129, 0}, {0, 0, 0}, {0}, {0, 300, 0, 0, 1, 0}}) {
    for (const int64_t offset : {0, 1}) {
      for (const int64_t behind : {0, 130}) {
        for (const float kept : {1.0F, 0.5F}) {
          check({.m = 264,
                 .n = 264,
                 .sizes = sizes,
                 .out_offset = offset,
                 .rows_behind = behind,
                 .kept = kept});
        }
      }
    }
  }
}

TEST(GroupedKernel, KeepsAndScales) {
  FSDPP_NEED_GPU();
  for (const int64_t offset : {0, 1}) {
    for (const float kept : {1.0F, 0.5F, 0.0F})
      check(
          {.m = 264, .n = 264, .sizes = random_sizes(5), .out_offset = offset, .kept = kept, .scale = 0.25F});
  }
}

TEST(GroupedKernel, NeverCountsRowsOfOthers) {
  FSDPP_NEED_GPU();
  for (const int64_t offset : {0, 1}) {
    for (const int size : kSizes) {
      for (const int nan_group : {0, 1, 2}) {
        check({.m = 136,
               .n = 264,
               .sizes = {33, size, 90},
               .out_offset = offset,
               .rows_behind = 77,
               .nan_group = nan_group});
      }
    }
  }
}

TEST(GroupedKernel, TakesMoreGroupsThanOneLaunch) {
  FSDPP_NEED_GPU();
  for (const int64_t offset : {0, 1})
    check({.m = 136, .n = 24, .sizes = random_sizes(300), .out_offset = offset, .rows_behind = 3});
}

// A weight's rows, hence its groups, may be asked for in pieces.
TEST(GroupedKernel, ComputesSomeOfTheGroups) {
  FSDPP_NEED_GPU();
  for (const int64_t offset : {0, 1}) {
    const Problem problem({.m = 136, .n = 72, .sizes = random_sizes(200), .out_offset = offset});
    for (const auto& [first, count] : {std::pair(0, 3), std::pair(3, 140), std::pair(143, 57)}) {
      device::GroupedProduct product = problem.product();
      product.first = first;
      product.groups = count;
      device::cuda_grouped_products(nullptr, product, std::span(problem.pointers).subspan(first, count),
                                    std::span(problem.add).subspan(first, count));
    }
    expect_right(problem);
  }
}

TEST(GroupedKernel, TakesManyTilesAndLongGroups) {
  FSDPP_NEED_GPU();
  check({.m = 1288, .n = 2056, .sizes = {3, 0, 250, 128, 0, 31}, .rows_behind = 20});
  check({.m = 2304, .n = 2304, .sizes = {0, 65, 1, 17}});
  check({.m = 136, .n = 264, .sizes = {2049, 4, 3000, 0, 777}});
}

TEST(GroupedKernel, HasTheSameBitsTwiceAndIsNearTheTruth) {
  FSDPP_NEED_GPU();
  for (const int64_t offset : {0, 1}) {
    Problem problem({.m = 520, .n = 776, .sizes = {700, 0, 65, 1300}, .out_offset = offset});
    problem.left = upload(random_floats(problem.rows * 520, 1), Element::bf16);
    problem.right = upload(random_floats(problem.rows * 776, 1), Element::bf16);
    for (auto* matrix : {&problem.left, &problem.right}) {
      for (float& value : matrix->values) value = from_bf16(to_bf16(value));
    }
    std::vector<std::vector<float>> first;
    for (int round = 0; round < 3; ++round) {
      for (std::size_t g = 0; g < problem.ends.size(); ++g) problem.reset(static_cast<int>(g));
      device::cuda_grouped_products(nullptr, problem.product(), problem.pointers, problem.add);
      for (std::size_t g = 0; g < problem.ends.size(); ++g) {
        const std::vector<float> out = problem.outputs[g]->download();
        if (round > 0) {
          EXPECT_EQ(first_difference(out, first[g]), -1);
          continue;
        }
        first.push_back(out);
        const std::vector<float> expected = problem.expected(static_cast<int>(g));
        EXPECT_LT(relative_error(out, {expected.begin(), expected.end()}), 1e-5);
      }
    }
  }
}

TEST(GroupedKernel, IsCapturedAndReadsTheOffsetsAtReplay) {
  FSDPP_NEED_GPU();
  for (const int64_t offset : {0, 1}) {
    Problem problem({.m = 136, .n = 264, .sizes = {33, 200, 90}, .out_offset = offset});
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t runnable;
    FSDPP_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    FSDPP_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    device::cuda_grouped_products(stream, problem.product(), problem.pointers, problem.add);
    FSDPP_CUDA(cudaStreamEndCapture(stream, &graph));
    FSDPP_CUDA(cudaGraphInstantiate(&runnable, graph, 0));
    for (const std::vector<int>& sizes :
         std::vector<std::vector<int>>{{33, 200, 90}, {0, 1, 321}, {129, 0, 64}}) {
      problem.c.sizes = sizes;
      problem.offsets.upload(problem.ends = ends_of(sizes));
      for (int g = 0; g < 3; ++g) problem.reset(g);
      FSDPP_CUDA(cudaGraphLaunch(runnable, stream));
      expect_right(problem);
    }
    FSDPP_CUDA(cudaGraphExecDestroy(runnable));
    FSDPP_CUDA(cudaGraphDestroy(graph));
    FSDPP_CUDA(cudaStreamDestroy(stream));
  }
}

// Else the plain kernel would do everything, right and slow, and no other test would tell.
TEST(GroupedKernel, RunsOnHoppersTensorCoresWhereItCan) {
  FSDPP_NEED_GPU();
  int major = 0;
  FSDPP_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major != 9) GTEST_SKIP() << "not a Hopper GPU";
  const auto suits = [](const Case& c) {
    const Problem problem(c);
    device::GroupTable table{};
    table.count = static_cast<int>(problem.pointers.size());
    std::copy(problem.pointers.begin(), problem.pointers.end(), table.out);
    return device::grouped_sm90_suits(problem.product(), table);
  };
  EXPECT_TRUE(suits({.m = 136, .n = 264, .sizes = {3, 4}}));
  EXPECT_TRUE(suits({.element = Element::fp16, .m = 8, .n = 8, .sizes = {3, 0}}));
  EXPECT_FALSE(suits({.element = Element::fp32, .sizes = {3, 4}}));
  EXPECT_FALSE(suits({.m = 132, .sizes = {3, 4}}));
  EXPECT_FALSE(suits({.n = 252, .sizes = {3, 4}}));
  EXPECT_FALSE(suits({.sizes = {3, 4}, .out_offset = 1}));
}

TEST(GroupedKernel, LeavesAloneWhatGetsNothingAdded) {
  FSDPP_NEED_GPU();
  Problem problem({.m = 136, .n = 264, .sizes = {0, 40, 0}});
  std::fill(problem.add.begin(), problem.add.end(), uint8_t{1});
  for (int g = 0; g < 3; ++g) problem.outputs[g]->upload(problem.before[g] = random_floats(136 * 264));
  device::cuda_grouped_products(nullptr, problem.product(), problem.pointers, problem.add);
  EXPECT_EQ(first_difference(problem.outputs[0]->download(), problem.before[0]), -1);
  EXPECT_EQ(first_difference(problem.outputs[2]->download(), problem.before[2]), -1);
  EXPECT_NE(first_difference(problem.outputs[1]->download(), problem.before[1]), -1);
}

TEST(GroupedKernel, RefusesWhatItCannotDo) {
  FSDPP_NEED_GPU();
  const Problem problem({.m = 8, .n = 8, .sizes = {3, 4}});
  const auto refuses = [&](auto change) {
    device::GroupedProduct product = problem.product();
    change(product);
    EXPECT_THROW(device::cuda_grouped_products(nullptr, product, problem.pointers, problem.add), UsageError);
  };
  refuses([](device::GroupedProduct& product) { product.groups = 0; });
  refuses([](device::GroupedProduct& product) { product.groups = 3; });
  refuses([](device::GroupedProduct& product) { product.m = -1; });
  refuses([](device::GroupedProduct& product) { product.rows = int64_t{1} << 31; });
  refuses([](device::GroupedProduct& product) { product.m = product.n = int64_t{1} << 20; });
}

}  // namespace
}  // namespace fsdpp::gpu_test
