#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "fsdpp/base/error.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/schedule.h"

namespace fsdpp::optim {
namespace {

TEST(WarmupCosine, RisesToThePeakAndFallsToTheFloor) {
  EXPECT_DOUBLE_EQ(warmup_cosine(0, 10, 100, 1.0, 0.1), 0.1);
  EXPECT_DOUBLE_EQ(warmup_cosine(9, 10, 100, 1.0, 0.1), 1.0);
  EXPECT_DOUBLE_EQ(warmup_cosine(10, 10, 100, 1.0, 0.1), 1.0);
  EXPECT_NEAR(warmup_cosine(99, 10, 100, 1.0, 0.1), 0.1, 1e-12);
  EXPECT_NEAR(warmup_cosine(500, 10, 100, 1.0, 0.1), 0.1, 1e-12);
  for (int step = 11; step < 100; ++step) {
    EXPECT_LT(warmup_cosine(step, 10, 100, 1.0, 0.1), warmup_cosine(step - 1, 10, 100, 1.0, 0.1));
  }
}

TEST(WarmupCosine, NamesABadValue) {
  EXPECT_THROW((void)warmup_cosine(-1, 0, 10, 1, 0), UsageError);
  try {
    (void)warmup_cosine(0, 20, 10, 1, 0);
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("warmup = 20"), std::string::npos) << error.what();
  }
}

TEST(AdamW, SkipsParametersWithoutGradientAndAllowsEmptyOnes) {
  at::Tensor with = at::full({3}, 1.0F).set_requires_grad(true);
  at::Tensor without = at::full({3}, 1.0F).set_requires_grad(true);
  at::Tensor empty = at::empty({0}, at::kFloat).set_requires_grad(true);
  with.mutable_grad() = at::full({3}, 0.5F);
  empty.mutable_grad() = at::empty({0}, at::kFloat);
  AdamW optimizer({with, without, empty}, {.eps = 0, .weight_decay = 0});
  optimizer.step(0.25);
  EXPECT_NEAR(with[0].item<float>(), 0.75F, 1e-6) << "the first step of Adam moves by the learning rate";
  EXPECT_EQ(without[0].item<float>(), 1.0F);
  EXPECT_EQ(optimizer.state_bytes(), 2 * 3 * 4);
}

TEST(AdamW, NamesABadOption) {
  EXPECT_THROW(AdamW(std::vector<at::Tensor>{}, {.beta1 = 1.0}), UsageError);
  EXPECT_THROW(AdamW(std::vector<at::Tensor>{}, {.weight_decay = -0.1}), UsageError);
  AdamW optimizer(std::vector<at::Tensor>{}, {});
  EXPECT_THROW(optimizer.step(-1), UsageError);
}

}  // namespace
}  // namespace fsdpp::optim
