// How near the weight gradients of a grouped linear layer come to cuBLAS's batched product of as much work.
#include <cublas_v2.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "fsdpp/base/error.h"
#include "fsdpp/device/cuda_grouped.h"
#include "tests/gpu/device_memory.cuh"

namespace fsdpp::gpu_test {
namespace {

using device::Element;

constexpr int kRounds = 9;

// Random bf16 in [-1, 1): zeros would draw less power, and so run faster.
__global__ void random_bf16_kernel(uint16_t* values, int64_t count, uint32_t seed) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count; i += stride) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761U + seed;
    x = (x ^ x >> 15) * 2246822519U;
    x = (x ^ x >> 13) * 3266489917U;
    values[i] =
        static_cast<uint16_t>(__float_as_uint(static_cast<float>(static_cast<int32_t>(x)) * 0x1p-31F) >> 16);
  }
}

template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) {
    FSDPP_CUDA(cudaMalloc(&data_, static_cast<std::size_t>(count) * sizeof(T)));
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  [[nodiscard]] T* data() const { return data_; }

 private:
  T* data_ = nullptr;
};

// Median milliseconds of each of `works`. They take turns: a busy GPU lowers its clocks with time.
std::vector<double> median_ms(const std::vector<std::function<void()>>& works) {
  cudaEvent_t begin;
  cudaEvent_t end;
  FSDPP_CUDA(cudaEventCreate(&begin));
  FSDPP_CUDA(cudaEventCreate(&end));
  std::vector<std::vector<float>> times(works.size());
  for (int round = -2; round < kRounds; ++round) {
    for (std::size_t w = 0; w < works.size(); ++w) {
      FSDPP_CUDA(cudaEventRecord(begin, nullptr));
      works[w]();
      FSDPP_CUDA(cudaEventRecord(end, nullptr));
      FSDPP_CUDA(cudaEventSynchronize(end));
      float milliseconds = 0;
      FSDPP_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
      if (round >= 0) times[w].push_back(milliseconds);
    }
  }
  FSDPP_CUDA(cudaEventDestroy(begin));
  FSDPP_CUDA(cudaEventDestroy(end));
  std::vector<double> medians;
  for (auto& of_one : times) {
    std::nth_element(of_one.begin(), of_one.begin() + kRounds / 2, of_one.end());
    medians.push_back(of_one[kRounds / 2]);
  }
  return medians;
}

class Cublas {
 public:
  Cublas() : workspace_(kWorkspace) {
    check(cublasCreate(&handle_));
    check(cublasSetWorkspace(handle_, workspace_.data(), kWorkspace));
  }
  ~Cublas() { cublasDestroy(handle_); }
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  // out[g] = left[g]^T @ right[g] (+ out[g]) for row-major matrices, as its column-major transpose.
  void products(const uint16_t* left, const uint16_t* right, float* out, int groups, int k, int m, int n,
                float beta) const {
    const float one = 1;
    check(cublasGemmStridedBatchedEx(handle_, CUBLAS_OP_N, CUBLAS_OP_T, n, m, k, &one, right, CUDA_R_16BF, n,
                                     int64_t{k} * n, left, CUDA_R_16BF, m, int64_t{k} * m, &beta, out,
                                     CUDA_R_32F, n, int64_t{m} * n, groups, CUBLAS_COMPUTE_32F,
                                     CUBLAS_GEMM_DEFAULT));
  }

 private:
  static constexpr int64_t kWorkspace = 64 << 20;
  static void check(cublasStatus_t status) {
    if (status != CUBLAS_STATUS_SUCCESS)
      throw EnvironmentError(text("cuBLAS: error ", static_cast<int>(status)));
  }
  cublasHandle_t handle_ = nullptr;
  Buffer<uint8_t> workspace_;
};

struct Shape {
  int64_t m;
  int64_t n;
};

// Ends of groups whose sizes are near each other but of no alignment, or of which few have most of the rows.
std::vector<int32_t> random_ends(int groups, int64_t rows, bool skewed) {
  std::vector<double> shares;
  for (int g = 0; g < groups; ++g)
    shares.push_back(skewed ? 1.0 / (1 + random_below(groups))
                            : 0.9 + 0.2e-3 * static_cast<double>(random_below(1000)));
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  std::vector<int32_t> ends;
  double at = 0;
  for (const double share : shares) ends.push_back(static_cast<int32_t>((at += share) / sum * rows));
  ends.back() = static_cast<int32_t>(rows);
  return ends;
}

TEST(BandwidthGrouped, ReachesMostOfCublas) {
  FSDPP_NEED_GPU();
  constexpr int64_t kMostRows = 65'536;
  constexpr int64_t kWidest = 14'336;
  const Buffer<uint16_t> left(kMostRows * 4096);
  const Buffer<uint16_t> right(kMostRows * kWidest);
  random_bf16_kernel<<<1024, 256>>>(left.data(), kMostRows * 4096, 1);
  random_bf16_kernel<<<1024, 256>>>(right.data(), kMostRows * kWidest, 2);
  const Buffer<float> out(64 * 4096 * kWidest);
  FSDPP_CUDA(cudaMemset(out.data(), 0, 64 * 4096 * kWidest * sizeof(float)));
  const Cublas cublas;
  std::printf(
      "TFLOP/s and ratio: ours, cuBLAS | both adding to out | ours: sizes near each other | few large\n");
  std::printf("%5s %5s %6s %5s\n", "m", "n", "groups", "rows");
  for (const Shape shape : {Shape{2048, 4096}, Shape{4096, 1536}, Shape{1536, 4096}, Shape{4096, 14'336}}) {
    for (const auto& [groups, each] :
         {std::pair{8, 4096}, {8, 2048}, {16, 1024}, {64, 1024}, {32, 512}, {64, 256}}) {
      const int64_t rows = int64_t{groups} * each;
      const double flop = 2.0 * static_cast<double>(rows * shape.m * shape.n);
      std::vector<float*> outputs;
      for (int g = 0; g < groups; ++g) outputs.push_back(out.data() + g * shape.m * shape.n);
      std::vector<int32_t> equal;
      for (int g = 0; g < groups; ++g) equal.push_back((g + 1) * each);
      const Memory<int32_t> offsets(equal);
      const Memory<int32_t> ragged(random_ends(groups, rows, false));
      const Memory<int32_t> skewed(random_ends(groups, rows, true));
      const auto ours = [&](const Memory<int32_t>& ends, bool add) {
        return [&, add] {
          const std::vector<uint8_t> flags(outputs.size(), add ? 1 : 0);
          device::cuda_grouped_products(nullptr,
                                        {.left = left.data(),
                                         .right = right.data(),
                                         .element = Element::bf16,
                                         .offsets = ends.data(),
                                         .groups = groups,
                                         .rows = rows,
                                         .m = shape.m,
                                         .n = shape.n},
                                        outputs, flags);
        };
      };
      const auto theirs = [&](bool add) {
        return [&, add] {
          cublas.products(left.data(), right.data(), out.data(), groups, each, static_cast<int>(shape.m),
                          static_cast<int>(shape.n), add ? 1.0F : 0.0F);
        };
      };
      std::vector<double> rate;
      for (const double ms : median_ms({ours(offsets, false), theirs(false), ours(offsets, true),
                                        theirs(true), ours(ragged, false), ours(skewed, false)}))
        rate.push_back(flop / ms / 1e9);
      std::printf("%5d %5d %6d %5d | %5.0f %5.0f %6.3f | %5.0f %5.0f %6.3f | %5.0f %6.3f | %5.0f %6.3f\n",
                  static_cast<int>(shape.m), static_cast<int>(shape.n), groups, each, rate[0], rate[1],
                  rate[0] / rate[1], rate[2], rate[3], rate[2] / rate[3], rate[4], rate[4] / rate[1], rate[5],
                  rate[5] / rate[1]);
      std::fflush(stdout);
      EXPECT_GT(rate[0] / rate[1], 0.85) << shape.m << " " << shape.n << " " << groups << " " << each;
    }
  }
}

// Outputs that are not aligned to 16 bytes: the kernel for everything.
TEST(BandwidthGrouped, PlainKernel) {
  FSDPP_NEED_GPU();
  constexpr int64_t kRows = 2048;
  constexpr int64_t kM = 2048;
  constexpr int64_t kN = 4096;
  constexpr int kGroups = 8;
  const Buffer<uint16_t> left(kRows * kM);
  const Buffer<uint16_t> right(kRows * kN);
  random_bf16_kernel<<<1024, 256>>>(left.data(), kRows * kM, 1);
  random_bf16_kernel<<<1024, 256>>>(right.data(), kRows * kN, 2);
  const Buffer<float> out(kGroups * kM * kN + 1);
  std::vector<float*> outputs;
  for (int g = 0; g < kGroups; ++g) outputs.push_back(out.data() + 1 + g * kM * kN);
  const Memory<int32_t> offsets(random_ends(kGroups, kRows, false));
  const std::vector<uint8_t> flags(kGroups, 0);
  const double ms = median_ms({[&] {
    device::cuda_grouped_products(nullptr,
                                  {.left = left.data(),
                                   .right = right.data(),
                                   .element = Element::bf16,
                                   .offsets = offsets.data(),
                                   .groups = kGroups,
                                   .rows = kRows,
                                   .m = kM,
                                   .n = kN},
                                  outputs, flags);
  }})[0];
  std::printf("the plain kernel: %.1f TFLOP/s\n", 2e-9 * kRows * kM * kN / ms);
}

}  // namespace
}  // namespace fsdpp::gpu_test
