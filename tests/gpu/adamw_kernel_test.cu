// AdamW on the GPU against the formula in fp64 and, bit by bit, against the same operations
// on the host.
#include <cuda_fp16.h>

#include <limits>
#include <memory>

#include "fsdpp/device/cuda_adamw.h"
#include "tests/gpu/device_memory.cuh"

namespace fsdpp::gpu_test {
namespace {

using device::AdamwRun;
using device::AdamwStep;
using device::Element;

// A run's numbers on the host.
struct Values {
  std::vector<float> main;
  std::vector<float> gradient;
  std::vector<float> first;
  std::vector<float> second;
};

Values random_values(int64_t count) {
  Values v = {random_floats(count, 2), random_floats(count), random_floats(count, 2),
              random_floats(count, 2)};
  for (float& x : v.second) x = std::fabs(x);
  return v;
}

// A run on the device.
struct OnDevice {
  OnDevice(const Values& v, int64_t offset, int64_t gradient_offset)
      : main(v.main, offset),
        gradient(v.gradient, gradient_offset),
        first(v.first, offset),
        second(v.second, offset),
        model(static_cast<int64_t>(v.main.size()), offset) {}
  [[nodiscard]] AdamwRun run() const {
    return {main.data(), gradient.data(), first.data(), second.data(), model.data(), main.size(), 0};
  }
  [[nodiscard]] bool guards_intact() const {
    return main.guards_intact() && gradient.guards_intact() && first.guards_intact() &&
           second.guards_intact() && model.guards_intact();
  }
  Memory<float> main;
  Memory<float> gradient;
  Memory<float> first;
  Memory<float> second;
  Memory<uint16_t> model;
};

using Runs = std::vector<std::unique_ptr<OnDevice>>;

constexpr int64_t kSizes[] = {0, 1, 3, 4, 5, 4095, 4096, 4097, 0, 100'003, 2, 8192, 300'001, 7, 0};

std::vector<Values> random_runs() {
  std::vector<Values> values;
  for (const int64_t size : kSizes) values.push_back(random_values(size));
  return values;
}

// Runs at the offsets 0 to 3; every fifth has its gradient at another place within 16 bytes.
Runs on_device(const std::vector<Values>& values) {
  Runs runs;
  for (std::size_t r = 0; r < values.size(); ++r) {
    const auto offset = static_cast<int64_t>(r % 4);
    runs.push_back(std::make_unique<OnDevice>(values[r], offset, r % 5 == 4 ? offset + 1 : offset));
  }
  return runs;
}

void update_runs(const Runs& runs, const AdamwStep& step) {
  std::vector<AdamwRun> table;
  for (const auto& run : runs) table.push_back(run->run());
  const int64_t tiles = device::place_tiles(std::span(table));
  const Memory<AdamwRun> device(table);
  device::cuda_adamw(nullptr, device.data(), static_cast<int>(table.size()), tiles, Element::bf16, step);
  FSDPP_CUDA(cudaDeviceSynchronize());
}

struct Reference {
  std::vector<double> main;
  std::vector<double> first;
  std::vector<double> second;
};

Reference in_double(const Values& v, const AdamwStep& s, double factor) {
  const double beta1 = static_cast<float>(s.beta1);
  const double beta2 = static_cast<float>(s.beta2);
  const double correction1 = 1 - std::pow(beta1, s.step);
  const double correction2 = std::sqrt(1 - std::pow(beta2, s.step));
  Reference r;
  for (std::size_t i = 0; i < v.main.size(); ++i) {
    const double gradient = v.gradient[i] * factor;
    r.first.push_back(beta1 * v.first[i] + (1 - beta1) * gradient);
    r.second.push_back(beta2 * v.second[i] + (1 - beta2) * gradient * gradient);
    const double decayed = v.main[i] * (1 - s.learning_rate * s.weight_decay);
    r.main.push_back(decayed - s.learning_rate / correction1 * r.first.back() /
                                   (std::sqrt(r.second.back()) / correction2 + s.eps));
  }
  return r;
}

__global__ void powers_kernel(float beta1, float beta2, float step, float* powers) {
  powers[0] = powf(beta1, step);
  powers[1] = powf(beta2, step);
}

// The kernel's operations one by one. Only the powers are not the same on every machine: they are taken from
// the GPU.
Values on_host(Values v, const AdamwStep& s) {
  const auto beta1 = static_cast<float>(s.beta1);
  const auto beta2 = static_cast<float>(s.beta2);
  const auto learning_rate = static_cast<float>(s.learning_rate);
  const float decay = learning_rate * static_cast<float>(s.weight_decay);
  const Memory<float> device_powers(2);
  powers_kernel<<<1, 1>>>(beta1, beta2, static_cast<float>(s.step), device_powers.data());
  FSDPP_CUDA(cudaGetLastError());
  const std::vector<float> powers = device_powers.download();
  const float step_size = learning_rate / (1 - powers[0]);
  const float root = std::sqrt(1 - powers[1]);
  for (std::size_t i = 0; i < v.main.size(); ++i) {
    const float g = v.gradient[i];
    v.main[i] = std::fma(-decay, v.main[i], v.main[i]);
    v.first[i] = std::fma(beta1, v.first[i], std::fma(-beta1, g, g));
    const float square = g * g;
    v.second[i] = std::fma(beta2, v.second[i], std::fma(-beta2, square, square));
    const float denominator = std::sqrt(v.second[i]) / root + static_cast<float>(s.eps);
    const float numerator = step_size * v.first[i];
    v.main[i] -= numerator / denominator;
  }
  return v;
}

// Runs are compared together: one element alone may cancel to anything.
template <class T>
void append(std::vector<T>& all, const std::vector<T>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

TEST(AdamwKernel, AgreesWithTheFormula) {
  FSDPP_NEED_GPU();
  const float factor = 0.37F;
  const Memory<float> device_factor(std::vector<float>{factor});
  for (const int64_t number : {1, 10, 1000}) {
    const std::vector<Values> values = random_runs();
    const Runs runs = on_device(values);
    AdamwStep step;
    step.step = number;
    step.gradient_factor = device_factor.data();
    update_runs(runs, step);
    Reference all;
    std::vector<float> main;
    std::vector<float> first;
    std::vector<float> second;
    for (std::size_t r = 0; r < runs.size(); ++r) {
      const Reference reference = in_double(values[r], step, factor);
      append(all.main, reference.main);
      append(all.first, reference.first);
      append(all.second, reference.second);
      append(main, runs[r]->main.download());
      append(first, runs[r]->first.download());
      append(second, runs[r]->second.download());
      EXPECT_EQ(first_difference(runs[r]->gradient.download(), values[r].gradient), -1) << "run " << r;
      EXPECT_TRUE(runs[r]->guards_intact()) << "run " << r;
    }
    EXPECT_LT(relative_error(main, all.main), 1e-6) << "step " << number;
    EXPECT_LT(relative_error(first, all.first), 1e-6) << "step " << number;
    EXPECT_LT(relative_error(second, all.second), 1e-6) << "step " << number;
  }
}

TEST(AdamwKernel, HasTheBitsOfItsOperationsAndRoundsTheModelsWeights) {
  FSDPP_NEED_GPU();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float odd[] = {0.0F, -0.0F, NAN, kInfinity, -kInfinity, 1e-40F, 3e38F};
  for (const int64_t number : {1, 7, 1000}) {
    std::vector<Values> values = random_runs();
    for (std::size_t i = 0; i < 7; ++i) values[9].gradient[i * 11] = values[9].main[i * 13 + 1] = odd[i];
    const Runs runs = on_device(values);
    AdamwStep step;
    step.step = number;
    update_runs(runs, step);
    for (std::size_t r = 0; r < runs.size(); ++r) {
      const Values expected = on_host(values[r], step);
      EXPECT_EQ(first_difference(runs[r]->main.download(), expected.main), -1) << "run " << r;
      EXPECT_EQ(first_difference(runs[r]->first.download(), expected.first), -1) << "run " << r;
      EXPECT_EQ(first_difference(runs[r]->second.download(), expected.second), -1) << "run " << r;
      std::vector<uint16_t> model;
      for (const float weight : expected.main) model.push_back(to_bf16(weight));
      EXPECT_EQ(first_difference(runs[r]->model.download(), model), -1) << "run " << r;
    }
  }
}

TEST(AdamwKernel, ReadsStepRateAndFactorFromTheDevice) {
  FSDPP_NEED_GPU();
  const std::vector<Values> values = random_runs();
  const Runs baked = on_device(values);
  const Runs read = on_device(values);
  const Memory<int64_t> counter(std::vector<int64_t>{0});
  Memory<float> rate(1);
  const Memory<float> one(std::vector<float>{1});
  for (int64_t number = 1; number <= 4; ++number) {
    AdamwStep step;
    step.step = number;
    step.learning_rate = 1e-3 * static_cast<double>(number);
    update_runs(baked, step);
    rate.upload({static_cast<float>(step.learning_rate)});
    step = {};
    step.step_counter = counter.data();
    step.learning_rate_now = rate.data();
    step.gradient_factor = one.data();
    device::cuda_advance_step(nullptr, counter.data());
    update_runs(read, step);
  }
  EXPECT_EQ(counter.download()[0], 4);
  for (std::size_t r = 0; r < baked.size(); ++r)
    EXPECT_EQ(first_difference(read[r]->main.download(), baked[r]->main.download()), -1) << "run " << r;
}

TEST(AdamwKernel, WritesModelWeightsOfEveryTypeOrNone) {
  FSDPP_NEED_GPU();
  const Values values = random_values(5'003);
  for (const Element element : {Element::fp32, Element::fp16}) {
    const OnDevice run(values, 0, 0);
    const Memory<float> wide(run.main.size());  // room for either
    std::vector<AdamwRun> table = {run.run()};
    table[0].model = wide.data();
    const int64_t tiles = device::place_tiles(std::span(table));
    const Memory<AdamwRun> device(table);
    device::cuda_adamw(nullptr, device.data(), 1, tiles, element, {});
    if (element == Element::fp32) {
      EXPECT_EQ(first_difference(wide.download(), run.main.download()), -1);
    } else {
      std::vector<uint16_t> halves(values.main.size());
      std::memcpy(halves.data(), wide.download().data(), halves.size() * 2);
      std::vector<uint16_t> expected;
      for (const float weight : run.main.download())
        expected.push_back(__half_as_ushort(__float2half_rn(weight)));
      EXPECT_EQ(first_difference(halves, expected), -1);
    }
    EXPECT_TRUE(wide.guards_intact());
  }
  const OnDevice run(values, 0, 0);
  std::vector<AdamwRun> table = {run.run()};
  table[0].model = nullptr;
  const int64_t tiles = device::place_tiles(std::span(table));
  const Memory<AdamwRun> device(table);
  device::cuda_adamw(nullptr, device.data(), 1, tiles, Element::bf16, {});
  EXPECT_EQ(first_difference(run.main.download(), on_host(values, {}).main), -1);
  EXPECT_EQ(first_difference(run.model.download(), std::vector<uint16_t>(5'003, 0xFFFF)), -1);  // untouched
}

TEST(AdamwKernel, NothingToDoIsFine) {
  FSDPP_NEED_GPU();
  device::cuda_adamw(nullptr, nullptr, 0, 0, Element::bf16, {});
  FSDPP_CUDA(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace fsdpp::gpu_test
