#include "fsdpp/nn/cross_entropy.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>
#include <string>
#include <tuple>

#include "fsdpp/base/error.h"

namespace fsdpp::nn {
namespace {

constexpr int64_t kTokens = 37;
constexpr int64_t kClasses = 11;

at::Tensor some_scores(at::ScalarType dtype) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(3);
  return at::empty({kTokens, kClasses}).normal_(0, 4, generator).to(dtype).requires_grad_();
}

at::Tensor some_targets(bool with_ignored) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(4);
  at::Tensor targets = at::empty({kTokens}, at::kLong).random_(0, kClasses, generator);
  if (with_ignored) targets.narrow(0, 5, 9).fill_(kIgnoredTarget);
  return targets;
}

class CrossEntropy : public testing::TestWithParam<std::tuple<at::ScalarType, int64_t, bool>> {};

TEST_P(CrossEntropy, IsLibtorchs) {
  const auto [dtype, at_a_time, with_ignored] = GetParam();
  const at::Tensor scores = some_scores(dtype);
  const at::Tensor targets = some_targets(with_ignored);
  const at::Tensor ours = cross_entropy(scores, targets, at_a_time);
  const at::Tensor theirs = at::cross_entropy_loss(scores.to(at::kFloat), targets);
  EXPECT_EQ(ours.scalar_type(), at::kFloat);
  EXPECT_EQ(ours.dim(), 0);
  EXPECT_TRUE(at::allclose(ours, theirs, 1e-6));
  // Scaled, as by a later division or a loss scale.
  const at::Tensor actual = torch::autograd::grad({ours * 3}, {scores})[0];
  const at::Tensor expected = torch::autograd::grad({theirs * 3}, {scores})[0];
  EXPECT_EQ(actual.scalar_type(), dtype);
  const double rounding = dtype == at::kBFloat16 ? 1.0 / 256 : 1e-5;
  EXPECT_TRUE(at::allclose(actual.to(at::kFloat), expected.to(at::kFloat), rounding, /*atol=*/1e-7));
}

INSTANTIATE_TEST_SUITE_P(Pieces, CrossEntropy,
                         testing::Combine(testing::Values(at::kFloat, at::kBFloat16, at::kDouble),
                                          // one row, some that do not divide, all; less than a row is one
                                          testing::Values(1, 5 * kClasses, kTokens* kClasses, kScoresAtATime),
                                          testing::Bool()));

TEST(CrossEntropyShapes, OneTokenOfOneClassIsCertain) {
  const at::Tensor scores = at::empty({1, 1}).fill_(7);
  EXPECT_EQ(cross_entropy(scores, at::empty({1}, at::kLong).fill_(0)).item<float>(), 0);
}

TEST(CrossEntropyShapes, ClassesThatCannotBeHaveNoGradient) {
  const at::Tensor scores = some_scores(at::kFloat).detach();
  scores.narrow(1, 0, 1).fill_(-std::numeric_limits<float>::infinity());
  scores.requires_grad_();
  const at::Tensor targets = some_targets(true);
  targets.masked_fill_(targets == 0, 1);
  const at::Tensor actual = torch::autograd::grad({cross_entropy(scores, targets)}, {scores})[0];
  EXPECT_TRUE(actual.isfinite().all().item<bool>());
  EXPECT_EQ(actual.narrow(1, 0, 1).count_nonzero().item<int64_t>(), 0);
}

TEST(CrossEntropyShapes, WhereNoTargetCountsNothingIsLearnt) {
  const at::Tensor scores = some_scores(at::kFloat);
  const at::Tensor loss = cross_entropy(scores, at::full({kTokens}, kIgnoredTarget, at::kLong));
  EXPECT_TRUE(loss.isnan().item<bool>()) << "a mean of nothing, as in libtorch";
  EXPECT_EQ(torch::autograd::grad({loss}, {scores})[0].count_nonzero().item<int64_t>(), 0);
}

TEST(CrossEntropyShapes, LargeScoresLoseNothing) {
  for (const double offset : {1e4, 1e6}) {
    const at::Tensor scores = (some_scores(at::kFloat).detach().round() + offset).requires_grad_();
    const at::Tensor targets = some_targets(false);
    const at::Tensor actual = torch::autograd::grad({cross_entropy(scores, targets)}, {scores})[0];
    const at::Tensor expected = torch::autograd::grad({at::cross_entropy_loss(scores, targets)}, {scores})[0];
    EXPECT_TRUE(at::allclose(actual, expected, 1e-5, 1e-8)) << offset;
  }
}

TEST(CrossEntropyShapes, AGradientOfTheGradientIsRefused) {
  const at::Tensor scores = some_scores(at::kFloat);
  const at::Tensor loss = cross_entropy(scores, some_targets(false));
  EXPECT_THROW(torch::autograd::grad({loss}, {scores}, {}, true, /*create_graph=*/true), UsageError);
}

TEST(CrossEntropyShapes, WhatDoesNotFitIsNamed) {
  const at::Tensor scores = some_scores(at::kFloat);
  try {
    static_cast<void>(cross_entropy(scores, some_targets(false).narrow(0, 0, 5)));
    FAIL() << "5 targets for " << kTokens << " tokens";
  } catch (const UsageError& error) {
    const std::string said = error.what();
    EXPECT_NE(said.find("scores of shape [37, 11] and targets of shape [5]"), std::string::npos) << said;
    EXPECT_NE(said.find("Flatten both"), std::string::npos) << said;
  }
}

}  // namespace
}  // namespace fsdpp::nn
