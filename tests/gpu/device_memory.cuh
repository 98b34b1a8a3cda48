#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "fsdpp/device/cuda_check.h"

/// Skips the test where there is no GPU.
#define FSDPP_NEED_GPU()                                                          \
  do {                                                                            \
    if (!::fsdpp::gpu_test::has_gpu()) GTEST_SKIP() << "this machine has no GPU"; \
  } while (false)

namespace fsdpp::gpu_test {

inline bool has_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

/// Fresh random numbers in every run; FSDPP_TEST_SEED repeats one.
inline std::mt19937_64& random_engine() {
  static std::mt19937_64 engine = [] {
    const char* const given = std::getenv("FSDPP_TEST_SEED");
    const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::printf("FSDPP_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
    return std::mt19937_64(seed);
  }();
  return engine;
}

inline int64_t random_below(int64_t limit) {
  return std::uniform_int_distribution<int64_t>(0, limit - 1)(random_engine());
}

/// Normal numbers times powers of two: sums of them round at every step.
inline std::vector<float> random_floats(int64_t count, int spread = 6) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values)
    value = std::ldexp(normal(random_engine()), static_cast<int>(random_below(2 * spread + 1)) - spread);
  return values;
}

/// Bits of the nearest bf16, ties to even.
inline uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

inline float from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

/// Device memory that begins as NaN, with as much on both sides that must stay so.
template <class T>
class Memory {
 public:
  /// `offset`: elements by which the data misses a multiple of 256 bytes.
  explicit Memory(int64_t count, int64_t offset = 0) : count_(count), offset_(offset) {
    FSDPP_CUDA(cudaMalloc(&base_, bytes_of_all()));
    poison();
  }
  explicit Memory(const std::vector<T>& values, int64_t offset = 0)
      : Memory(static_cast<int64_t>(values.size()), offset) {
    upload(values);
  }
  ~Memory() { cudaFree(base_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(base_ + kGuard) + offset_; }
  [[nodiscard]] int64_t size() const { return count_; }

  void poison() {
    FSDPP_CUDA(cudaMemset(base_, 0xFF, bytes_of_all()));
    FSDPP_CUDA(cudaDeviceSynchronize());
  }
  void upload(const std::vector<T>& values) {
    if (count_ > 0) FSDPP_CUDA(cudaMemcpy(data(), values.data(), bytes(), cudaMemcpyHostToDevice));
  }
  [[nodiscard]] std::vector<T> download() const {
    FSDPP_CUDA(cudaDeviceSynchronize());
    std::vector<T> values(static_cast<std::size_t>(count_));
    if (count_ > 0) FSDPP_CUDA(cudaMemcpy(values.data(), data(), bytes(), cudaMemcpyDeviceToHost));
    return values;
  }
  /// Whether nothing outside the data was written.
  [[nodiscard]] bool guards_intact() const {
    FSDPP_CUDA(cudaDeviceSynchronize());
    std::vector<unsigned char> all(bytes_of_all());
    FSDPP_CUDA(cudaMemcpy(all.data(), base_, all.size(), cudaMemcpyDeviceToHost));
    const auto first = static_cast<std::ptrdiff_t>(reinterpret_cast<unsigned char*>(data()) - base_);
    const auto is_poison = [](unsigned char byte) { return byte == 0xFF; };
    return std::all_of(all.begin(), all.begin() + first, is_poison) &&
           std::all_of(all.begin() + first + static_cast<std::ptrdiff_t>(bytes()), all.end(), is_poison);
  }

 private:
  static constexpr std::size_t kGuard = 256;
  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(count_) * sizeof(T); }
  [[nodiscard]] std::size_t bytes_of_all() const {
    return bytes() + static_cast<std::size_t>(offset_) * sizeof(T) + 2 * kGuard;
  }

  unsigned char* base_ = nullptr;
  int64_t count_;
  int64_t offset_;
};

/// Index of the first element whose bits differ, or -1. NaNs count as equal.
template <class T>
int64_t first_difference(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if constexpr (std::is_floating_point_v<T>) {
      if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    }
    if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0) return static_cast<int64_t>(i);
  }
  return -1;
}

/// ||out - reference|| / ||reference||; NaN if anything is NaN.
inline double relative_error(const std::vector<float>& out, const std::vector<double>& reference) {
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    difference += (out[i] - reference[i]) * (out[i] - reference[i]);
    norm += reference[i] * reference[i];
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

}  // namespace fsdpp::gpu_test
