// Fused weight gradients of weights that belong to no sharded model, in their own .grad.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/nn/embedding.h"
#include "fsdpp/nn/linear.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/runtime/own_gradients.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp {
namespace {

using runtime::OwnGradients;
using test::expect_in;
using test::thrown_text;

at::Tensor weight_of(at::IntArrayRef sizes, at::ScalarType dtype, double value = 1) {
  return at::full(sizes, value, at::TensorOptions().dtype(dtype)).requires_grad_();
}

// One backward whose weight gradient has `value` everywhere.
void backward(const at::Tensor& weight, double value) {
  const at::Tensor input = at::full({1, weight.size(1)}, value, weight.options().requires_grad(false));
  nn::fused_linear(input, weight).sum().backward();
}

void expect_all(const at::Tensor& tensor, double value) {
  ASSERT_TRUE(tensor.defined());
  EXPECT_TRUE(tensor.eq(value).all().item<bool>()) << tensor;
}

TEST(OwnGradients, MicrobatchesOfBf16WeightsAddUpInFp32InOnePlace) {
  const at::Tensor weight = weight_of({3, 4}, at::kBFloat16);
  const OwnGradients own({weight});
  backward(weight, 256);
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  const void* place = weight.grad().const_data_ptr();
  backward(weight, 1);
  expect_all(weight.grad(), 257);  // no bf16 has it
  EXPECT_EQ(weight.grad().const_data_ptr(), place);
  weight.mutable_grad().zero_();
  backward(weight, 2);
  expect_all(weight.grad(), 2);
  weight.mutable_grad().reset();
  backward(weight, 3);
  expect_all(weight.grad(), 3);
}

TEST(OwnGradients, InTheWeightsDtypeForOptimizersThatWantThat) {
  const at::Tensor weight = weight_of({3, 4}, at::kBFloat16);
  const OwnGradients own({weight}, at::kBFloat16);
  for (const double value : {2.0, 3.0}) backward(weight, value);
  EXPECT_EQ(weight.grad().scalar_type(), at::kBFloat16);
  expect_all(weight.grad(), 5);
}

// The same weight through a fused and an unfused layer, several times each, and an embedding's table.
TEST(OwnGradients, SharedUsesAddUp) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor weight = weight_of({4, 4}, dtype);
    const at::Tensor bias = weight_of({4}, dtype);
    const OwnGradients own({weight, bias});
    const at::Tensor input = at::ones({2, 3, 4}, weight.options().requires_grad(false));
    for (int microbatch = 1; microbatch <= 2; ++microbatch) {
      const at::Tensor fused =
          nn::fused_linear(input, weight, bias).sum() + nn::fused_linear(input, weight).sum();
      const at::Tensor plain = (input * weight[0]).sum();  // 6 on the first row
      const at::Tensor rows = nn::fused_embedding(weight, at::ones({5}, at::kLong)).sum();  // 5 on the second
      (fused + plain + rows).backward();
      expect_all(weight.grad()[0], microbatch * 18);
      expect_all(weight.grad()[1], microbatch * 17);
      expect_all(weight.grad()[2], microbatch * 12);
      expect_all(bias.grad(), microbatch * 6);
      EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
    }
  }
}

TEST(OwnGradients, AutogradGradGetsItsOwnProductAndLeavesTheSumAlone) {
  const at::Tensor weight = weight_of({3, 4}, at::kFloat);
  const OwnGradients own({weight});
  backward(weight, 5);
  for (int time = 0; time < 2; ++time) {
    const at::Tensor input = at::full({1, 4}, 7.0);
    const auto found = torch::autograd::grad({nn::fused_linear(input, weight).sum()}, {weight});
    expect_all(found[0], 7);
    expect_all(weight.grad(), 5);
  }
}

TEST(OwnGradients, AHookSeesAndScalesEachGradient) {
  const at::Tensor weight = weight_of({3, 4}, at::kFloat);
  const OwnGradients own({weight});
  std::vector<double> seen;
  const auto hook = weight.register_hook([&](const at::Tensor& gradient) {
    seen.push_back(gradient.max().item<double>());
    return gradient * 0.5;
  });
  for (const double value : {2.0, 4.0}) backward(weight, value);
  EXPECT_EQ(seen, (std::vector<double>{2, 4}));
  expect_all(weight.grad(), 3);
  weight.remove_hook(hook);
  backward(weight, 1);
  expect_all(weight.grad(), 4);
}

// What Python's register_post_accumulate_grad_hook makes: an optimizer in the backward, say.
class AfterAccumulation final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit AfterAccumulation(std::vector<double>& seen) : seen_(seen) {}
  void operator()(const at::Tensor& leaf) override { seen_.push_back(leaf.grad().max().item<double>()); }

 private:
  std::vector<double>& seen_;
};

TEST(OwnGradients, APostAccumulateHookSeesEachSum) {
  const at::Tensor weight = weight_of({3, 4}, at::kFloat);
  const OwnGradients own({weight});
  std::vector<double> seen;
  torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<AfterAccumulation>(seen));
  for (const double value : {2.0, 3.0}) backward(weight, value);
  EXPECT_EQ(seen, (std::vector<double>{2, 5}));
  expect_all(weight.grad(), 5);
}

TEST(OwnGradients, HigherDerivativesAndRetainedGraphs) {
  const at::Tensor weight = weight_of({2, 2}, at::kFloat, 3);
  const OwnGradients own({weight});
  const at::Tensor input = at::ones({1, 2});
  const at::Tensor loss = nn::fused_linear(input, weight).pow(2).sum();  // rows sum to 6: gradient 12
  const auto first =
      torch::autograd::grad({loss}, {weight}, {}, /*retain_graph=*/true, /*create_graph=*/true);
  expect_all(first[0].detach(), 12);
  expect_all(torch::autograd::grad({first[0].sum()}, {weight}, {}, true)[0], 4);
  for (const double expected : {12.0, 24.0}) {
    loss.backward({}, /*retain_graph=*/true);
    expect_all(weight.grad(), expected);
  }
}

TEST(OwnGradients, AdamWLeavesAloneWhatItDoesNotUpdate) {
  const at::Tensor weight = weight_of({3, 4}, at::kBFloat16);
  const at::Tensor other = weight_of({3, 4}, at::kBFloat16);
  const at::Tensor plain = weight_of({4}, at::kBFloat16);  // its gradient has its dtype
  const OwnGradients own({weight, other});
  optim::AdamW optimizer({weight, other, plain}, {});
  backward(weight, 1);
  backward(other, 1);
  plain.mutable_grad() = at::ones({4}, plain.options().requires_grad(false));
  optimizer.step(0.1);
  EXPECT_LT(plain.max().item<double>(), 1);
  {
    const at::NoGradGuard no_grad;
    weight.fill_(7);
  }
  weight.mutable_grad().reset();
  optimizer.step(0.1);
  expect_all(weight, 7);
}

TEST(OwnGradients, ANewAccumulatorIsNoticed) {
  const at::Tensor weight = weight_of({2, 2}, at::kFloat);
  const OwnGradients own({weight});
  weight.set_data(at::ones({2, 2}, at::kDouble));
  EXPECT_THROW(nn::fused_linear(at::ones({1, 2}, at::kDouble), weight).sum().backward(), UsageError);
}

TEST(OwnGradients, LeavesNothingBehind) {
  const at::Tensor weight = weight_of({3, 4}, at::kBFloat16);
  {
    const OwnGradients own({weight});
  }
  backward(weight, 2);
  EXPECT_EQ(weight.grad().scalar_type(), at::kBFloat16);
  expect_all(weight.grad(), 2);
}

TEST(OwnGradients, WhatCannotBeSaysSo) {
  const at::Tensor weight = weight_of({3, 4}, at::kFloat);
  expect_in(thrown_text([&] { OwnGradients({weight, weight}); }), "weight 1 has a sink already");
  expect_in(thrown_text([&] { OwnGradients({weight}, at::kBFloat16); }), "expected fp32 or the weight's own");
  expect_in(thrown_text([&] { OwnGradients({weight * 2}); }), "weight 0 is not a leaf");
  expect_in(thrown_text([&] { OwnGradients({at::ones({2, 2})}); }), "requires a gradient");
  const at::Tensor half = weight_of({3, 4}, at::kBFloat16);
  half.mutable_grad() = at::ones({3, 4}, half.options().requires_grad(false));
  expect_in(thrown_text([&] { OwnGradients({half}); }), "has a gradient in");
  const OwnGradients own({weight});  // none of these has left a sink
}

// Main weights in fp32 behind bf16 parameters: ten steps are those of fp32 parameters, rounded.
TEST(OwnGradients, OurAdamWKeepsMainWeights) {
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(3);
  const at::Tensor start = at::randn({4, 8}, random);
  const at::Tensor weight = start.to(at::kBFloat16).requires_grad_();
  const at::Tensor reference = weight.detach().to(at::kFloat).requires_grad_();
  const OwnGradients own({weight});
  optim::AdamW ours({weight}, {.weight_decay = 0.1});
  torch::optim::AdamW theirs({reference}, torch::optim::AdamWOptions(1e-4).weight_decay(0.1));
  for (int step = 0; step < 10; ++step) {
    for (int microbatch = 0; microbatch < 2; ++microbatch) {
      const at::Tensor input = at::randn({2, 8}, random).to(at::kBFloat16);
      nn::fused_linear(input, weight).sum().backward();
    }
    reference.mutable_grad() = weight.grad().clone();
    ours.step(1e-4);
    theirs.step();
    EXPECT_TRUE(at::allclose(weight.detach().to(at::kFloat), reference.detach(), 1e-2, 1e-6)) << step;
    EXPECT_TRUE(weight.detach().equal(reference.detach().to(at::kBFloat16))) << step;
    weight.mutable_grad().reset();
  }
  EXPECT_EQ(ours.state_bytes(), 3 * 4 * 8 * 4);
  {
    const at::NoGradGuard no_grad;
    weight.fill_(1);  // somebody else's weights count
  }
  backward(weight, 0);
  ours.step(0);
  expect_all(weight, 1);
}

}  // namespace
}  // namespace fsdpp
