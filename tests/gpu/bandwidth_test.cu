// How near the kernels come to the bandwidth of a device-to-device copy in the same run.
#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <numeric>

#include "fsdpp/device/cuda_adamw.h"
#include "fsdpp/device/cuda_norm.h"
#include "fsdpp/device/cuda_rows.h"
#include "fsdpp/device/cuda_sum.h"
#include "tests/gpu/device_memory.cuh"

namespace fsdpp::gpu_test {
namespace {

using device::Element;

constexpr int kRounds = 15;
constexpr int64_t kWeights = 200'000'000;  // one layer of the 8B shape; far beyond any cache

__global__ void random_kernel(float* values, int64_t count, uint32_t seed) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count; i += stride) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761U + seed;
    x = (x ^ x >> 15) * 2246822519U;
    x = (x ^ x >> 13) * 3266489917U;
    values[i] = static_cast<float>((x ^ x >> 16) >> 8) * 0x1p-24F + 1e-3F;
  }
}

// Device memory full of random numbers in (0, 1].
class Floats {
 public:
  explicit Floats(int64_t count, uint32_t seed = 1) {
    FSDPP_CUDA(cudaMalloc(&data_, static_cast<std::size_t>(count) * sizeof(float)));
    random_kernel<<<1024, 256>>>(data_, count, seed);
    FSDPP_CUDA(cudaGetLastError());
  }
  ~Floats() { cudaFree(data_); }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
  [[nodiscard]] float* data() const { return data_; }

 private:
  float* data_ = nullptr;
};

double median_ms(const std::function<void()>& work) {
  cudaEvent_t begin;
  cudaEvent_t end;
  FSDPP_CUDA(cudaEventCreate(&begin));
  FSDPP_CUDA(cudaEventCreate(&end));
  std::vector<float> times;
  for (int round = -3; round < kRounds; ++round) {
    FSDPP_CUDA(cudaEventRecord(begin, nullptr));
    work();
    FSDPP_CUDA(cudaEventRecord(end, nullptr));
    FSDPP_CUDA(cudaEventSynchronize(end));
    float milliseconds = 0;
    FSDPP_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
    if (round >= 0) times.push_back(milliseconds);
  }
  FSDPP_CUDA(cudaEventDestroy(begin));
  FSDPP_CUDA(cudaEventDestroy(end));
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return times[kRounds / 2];
}

// GB/s, read and written, of a copy of 1 GiB. Measured anew for every test: the GPU's clocks move.
double copy_bandwidth() {
  constexpr int64_t kCount = int64_t{1} << 28;
  const Floats source(kCount);
  const Floats target(kCount);
  const double ms = median_ms([&] {
    FSDPP_CUDA(
        cudaMemcpyAsync(target.data(), source.data(), kCount * sizeof(float), cudaMemcpyDeviceToDevice));
  });
  return 2.0 * kCount * sizeof(float) / ms / 1e6;
}

// Prints a line and returns the share of the copy's bandwidth.
double report(const char* what, double bytes, double ms, double copy) {
  const double rate = bytes / ms / 1e6;
  std::printf("%-44s %9.3f ms %8.0f GB/s  %5.3f of copy (%.0f GB/s)\n", what, ms, rate, rate / copy, copy);
  return rate / copy;
}

TEST(BandwidthSum, RunsAtTheBandwidthOfItsBytes) {
  FSDPP_NEED_GPU();
  const double copy = copy_bandwidth();
  const Floats out(kWeights);
  std::vector<std::unique_ptr<Floats>> memory;
  std::vector<const void*> pointers;
  for (int s = 0; s < 8; ++s)
    pointers.push_back(memory.emplace_back(std::make_unique<Floats>(kWeights, s))->data());
  for (const int sources : {1, 2, 4, 8}) {
    for (const Element wire : {Element::fp32, Element::bf16}) {
      for (const bool add : {false, true}) {
        const double ms = median_ms([&] {
          device::cuda_sum_in_rank_order(nullptr, out.data(), std::span(pointers).first(sources), wire,
                                         kWeights, 0.5F, add);
        });
        const double per_weight = sources * static_cast<double>(device::element_size(wire)) + (add ? 8 : 4);
        const std::string what =
            text("sum of ", sources, wire == Element::fp32 ? " fp32" : " bf16", add ? ", added to out" : "");
        EXPECT_GT(report(what.c_str(), per_weight * kWeights, ms, copy), 0.85) << what;
      }
    }
  }
  const double ms = median_ms([&] {  // another place within 16 bytes
    const std::array<const void*, 2> shifted = {memory[0]->data() + 1, memory[1]->data() + 2};
    device::cuda_sum_in_rank_order(nullptr, out.data(), shifted, Element::fp32, kWeights - 2, 0.5F, false);
  });
  report("sum of 2 fp32, not aligned alike", 12.0 * kWeights, ms, copy);
}

// `count` weights in runs of a model's very different sizes, all multiples of 4.
std::vector<int64_t> run_sizes(int64_t count) {
  constexpr int64_t kPattern[] = {4096,      8'388'608, 2'097'152,  4,          2'097'152,
                                  8'388'608, 4096,      29'360'128, 29'360'128, 1000};
  std::vector<int64_t> sizes;
  for (std::size_t k = 0; count > 0; ++k) {
    sizes.push_back(std::min(count, kPattern[k % std::size(kPattern)]));
    count -= sizes.back();
  }
  return sizes;
}

TEST(BandwidthAdamw, ReachesMostOfTheCopysBandwidth) {
  FSDPP_NEED_GPU();
  const double copy = copy_bandwidth();
  const Floats main(kWeights, 1);
  const Floats gradient(kWeights, 2);
  const Floats first(kWeights, 3);
  const Floats second(kWeights, 4);
  const Memory<uint16_t> model(kWeights);
  std::vector<device::AdamwRun> list;
  int64_t at = 0;
  for (const int64_t size : run_sizes(kWeights)) {
    list.push_back({main.data() + at, gradient.data() + at, first.data() + at, second.data() + at,
                    model.data() + at, size, 0});
    at += size;
  }
  const int64_t tiles = device::place_tiles(std::span(list));
  const Memory<device::AdamwRun> table(list);
  const auto runs = static_cast<int>(list.size());
  const double ms = median_ms(
      [&] { device::cuda_adamw(nullptr, table.data(), runs, tiles, Element::bf16, device::AdamwStep{}); });
  EXPECT_GT(report("AdamW, fp32 main weights (30 bytes)", 30.0 * kWeights, ms, copy), 0.85);
  std::printf("  over %d runs\n", runs);
}

TEST(BandwidthNorm, ReachesMostOfTheCopysBandwidth) {
  FSDPP_NEED_GPU();
  const double copy = copy_bandwidth();
  const Floats gradient(kWeights);
  std::vector<device::NormRun> table;
  int64_t at = 0;
  for (const int64_t size : run_sizes(kWeights)) {
    table.push_back({gradient.data() + at, size, 0});
    at += size;
  }
  const int64_t tiles = device::place_tiles(std::span(table));
  const Memory<device::NormRun> runs(table);
  const Memory<double> workspace(device::kNormWorkspace);
  const Memory<double> part(1);
  for (const double norm_type : {2.0, 1.0, 3.0, HUGE_VAL}) {
    const double ms = median_ms([&] {
      device::cuda_norm_part(nullptr, runs.data(), static_cast<int>(table.size()), tiles, norm_type,
                             workspace.data(), part.data());
    });
    const double share = report(text("norm ", norm_type).c_str(), 4.0 * kWeights, ms, copy);
    if (norm_type == 2.0) EXPECT_GT(share, 0.75);
  }
}

// Two ranks of the 8B shape's embedding on one GPU, and ids as a text has them: few words often.
TEST(BandwidthRows, GatherAndAdd) {
  FSDPP_NEED_GPU();
  constexpr int64_t kVocabulary = 128'256;
  constexpr int64_t kDim = 4096;
  constexpr int64_t kTokens = 8192;  // of each rank
  const double copy = copy_bandwidth();
  const Floats table_memory(kVocabulary * kDim / 2);
  const Floats out(kTokens * kDim / 2);
  device::RowTable table;
  table.shard_elements = kVocabulary * kDim / 2;
  table.rows = kVocabulary;
  table.dim = kDim;
  for (int r = 0; r < 2; ++r)
    table.shards[r] = reinterpret_cast<uint16_t*>(table_memory.data()) + r * table.shard_elements;
  const Floats gradient_memory(2 * kTokens * kDim / 2);
  device::RowGradients gradients;
  gradients.ranks = 2;
  gradients.dim = kDim;
  for (int r = 0; r < 2; ++r) {
    gradients.gradients[r] = reinterpret_cast<uint16_t*>(gradient_memory.data()) + r * kTokens * kDim;
    gradients.counts[r] = kTokens;
  }
  const Floats sums(table.shard_elements);
  for (const bool like_text : {false, true}) {
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < 2 * kTokens; ++i) {
      const double x = static_cast<double>(random_below(1 << 30)) / (1 << 30);
      ids.push_back(like_text ? static_cast<int64_t>(std::pow(static_cast<double>(kVocabulary), x)) - 1
                              : random_below(kVocabulary));
    }
    const Memory<int64_t> device_ids(ids);
    const double gather_ms =
        median_ms([&] { device::cuda_gather_rows(nullptr, out.data(), device_ids.data(), kTokens, table); });
    const char* const kind = like_text ? "like a text's" : "all alike";
    report(text("gather rows, ids ", kind).c_str(), 4.0 * kTokens * kDim, gather_ms, copy);

    std::vector<int64_t> order(ids.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
    std::vector<int64_t> sorted;
    for (const int64_t position : order) sorted.push_back(ids[position]);
    const auto owned = std::lower_bound(sorted.begin(), sorted.end(), kVocabulary / 2) - sorted.begin();
    const auto distinct =
        std::unique(ids.begin(), (std::copy_n(sorted.begin(), owned, ids.begin()))) - ids.begin();
    const Memory<int64_t> device_order(order);
    const Memory<int64_t> device_sorted(sorted);
    const double add_ms = median_ms([&] {
      device::cuda_add_rows(nullptr, {sums.data(), 0, table.shard_elements},
                            {device_sorted.data(), device_order.data(), 2 * kTokens}, gradients, 0.5F, false);
    });
    report(text("add rows, ids ", kind).c_str(), (2.0 * owned + 4.0 * distinct) * kDim, add_ms, copy);
  }
}

// One id 100,000 times: the sums are one after the other, so this is bound by additions, not by bytes.
TEST(BandwidthRows, OneIdOneHundredThousandTimes) {
  FSDPP_NEED_GPU();
  constexpr int64_t kDim = 4096;
  constexpr int64_t kTokens = 100'000;
  const double copy = copy_bandwidth();
  const Floats gradient(kTokens * kDim / 2);
  const Floats sums(kDim);
  device::RowGradients gradients;
  gradients.gradients[0] = gradient.data();
  gradients.counts[0] = kTokens;
  gradients.ranks = 1;
  gradients.dim = kDim;
  const Memory<int64_t> sorted(std::vector<int64_t>(kTokens, 0));
  std::vector<int64_t> positions(kTokens);
  std::iota(positions.begin(), positions.end(), 0);
  const Memory<int64_t> order(positions);
  const double ms = median_ms([&] {
    device::cuda_add_rows(nullptr, {sums.data(), 0, kDim}, {sorted.data(), order.data(), kTokens}, gradients,
                          1, false);
  });
  report("add rows, one id 100,000 times", 2.0 * kTokens * kDim, ms, copy);
  EXPECT_LT(ms, 5.0);
}

}  // namespace
}  // namespace fsdpp::gpu_test
