#include "fsdpp/nn/rotary.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

namespace fsdpp::nn {
namespace {

constexpr int64_t kLength = 5;
constexpr int64_t kHead = 6;

// What the papers write: x cos + turned sin.
at::Tensor by_formula(const at::Tensor& x, const Rotary& angles) {
  const int64_t half = x.size(-1) / 2;
  const at::Tensor turned = at::cat({-x.narrow(-1, half, half), x.narrow(-1, 0, half)}, -1);
  return x * angles.cos + turned * angles.sin;
}

at::Tensor some(uint64_t seed) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  // Heads and positions exchanged in memory, as attention has them.
  return at::empty({2, kLength, 3, kHead}, at::kDouble).normal_(0, 1, generator).transpose(1, 2);
}

TEST(Rotary, TurnsTheHalvesAgainstEachOther) {
  const Rotary angles = rotary(kLength, kHead, 10000, at::kDouble);
  const at::Tensor x = some(1);
  const at::Tensor turned = rotate(x, angles);
  EXPECT_TRUE(at::allclose(turned, by_formula(x, angles)));
  EXPECT_EQ(turned.strides(), x.strides());
  EXPECT_TRUE(at::allclose((turned * turned).sum(), (x * x).sum())) << "lengths stay";
}

TEST(Rotary, ItsGradientsAreTheFormulas) {
  using torch::autograd::grad;
  const Rotary angles = rotary(kLength, kHead, 10000, at::kDouble);
  const at::Tensor x = some(1).detach().requires_grad_();
  const at::Tensor weigh = some(2);
  const auto gradients = [&](const at::Tensor& turned) {
    const at::Tensor loss = (turned * turned * turned * weigh).sum();
    const at::Tensor first = grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return std::pair(first, grad({(first * weigh).sum()}, {x})[0]);
  };
  const auto [first, second] = gradients(rotate(x, angles));
  const auto [expected_first, expected_second] = gradients(by_formula(x, angles));
  EXPECT_TRUE(at::allclose(first, expected_first));
  EXPECT_TRUE(at::allclose(second, expected_second));
}

}  // namespace
}  // namespace fsdpp::nn
