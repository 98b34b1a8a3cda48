// Small gradients worked out by hand: what rounding, overwriting, copying or rescaling would show.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/nn/embedding.h"
#include "fsdpp/nn/linear.h"
#include "fsdpp/runtime/call.h"
#include "fsdpp/runtime/fully_shard.h"
#include "tests/support/hazard_watch.h"

namespace fsdpp {
namespace {

using runtime::Combine;
using runtime::ShardedModel;
using runtime::Strategy;
using test::run_watched_ranks;
using test::watched_shard;

// A table, a layer of ours with a bias and a layer of the user's own; `weigh` is the gradient of each of
// their elements.
class Small : public torch::nn::Module {
 public:
  static constexpr int64_t kIn = 7;
  static constexpr int64_t kOut = 3;

  explicit Small(at::ScalarType dtype) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(1);
    table_ = register_module("table", std::make_shared<nn::Embedding>(1, kIn, 1.0, generator));
    ours_ = register_module("ours",
                            std::make_shared<nn::Linear>(nn::LinearOptions{kIn, kOut, true}, 1.0, generator));
    theirs_ = register_parameter("theirs", at::ones({kOut, kIn}));
    to(dtype);
    theirs_ = named_parameters(/*recurse=*/false)["theirs"];
  }

  // A sum of terms each linear in one weight with the factor `weigh`; no gradient meets another.
  [[nodiscard]] at::Tensor forward(double weigh) const {
    const auto dtype = theirs_.scalar_type();
    const at::Tensor x = at::ones({1, kIn}, dtype);
    const at::Tensor rows = table_->forward(at::zeros({1}, at::kLong));
    return (rows * weigh).sum() + (ours_->forward(x) * weigh).sum() + (at::linear(x, theirs_) * weigh).sum();
  }

 private:
  std::shared_ptr<nn::Embedding> table_;
  std::shared_ptr<nn::Linear> ours_;
  at::Tensor theirs_;
};

using Case = std::tuple<Strategy, bool>;  // and fused

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const auto [strategy, fused] = info.param;
  return text(runtime::to_string(strategy), fused ? "_Fused" : "_Unfused");
}

class GradientCases : public testing::TestWithParam<Case> {
 protected:
  struct Model {
    std::shared_ptr<Small> small;
    std::shared_ptr<ShardedModel> sharded;
    void backward(double weigh) const { call(*small, weigh).backward(); }
  };

  [[nodiscard]] static Model make(comm::PeerGroup& group, at::ScalarType dtype, Combine combine) {
    const auto [strategy, fused] = GetParam();
    Model model{std::make_shared<Small>(dtype), nullptr};
    model.sharded = watched_shard(group, model.small, std::vector<std::shared_ptr<torch::nn::Module>>{},
                                  {.strategy = strategy, .combine = combine, .fused = fused});
    return model;
  }

  // Every element of every gradient, in fp32.
  static void expect_all(const Model& model, double value, const std::string& when) {
    const auto names = model.sharded->parameters();
    const std::vector<at::Tensor> gradients = model.sharded->full_gradients();
    ASSERT_EQ(gradients.size(), 4U);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      ASSERT_TRUE(gradients[i].defined()) << names[i].first << " " << when;
      EXPECT_EQ(gradients[i].scalar_type(), at::kFloat);
      EXPECT_TRUE(gradients[i].equal(at::full(names[i].second, value, at::kFloat)))
          << names[i].first << " " << when << ": expected " << value << ", got up to "
          << gradients[i].max().item<float>();
    }
  }
};

// 257 has no bf16: a rank's part is rounded on its way, the sum of the ranks' parts is not.
TEST(GradientWire, Case02Bf16RoundsEachRanksPartAndNotTheirSum) {
  struct Parts {
    double first, second, sum;
  };
  run_watched_ranks(2, [](comm::PeerGroup& group) {
    const auto small = std::make_shared<Small>(at::kFloat);
    const auto sharded = watched_shard(group, small, std::vector<std::shared_ptr<torch::nn::Module>>{},
                                       {.combine = Combine::sum, .wire_dtype = at::kBFloat16});
    for (const Parts& parts : {Parts{256, 1, 257}, Parts{257, 1, 257}, Parts{259, 0, 260}}) {
      call(*small, group.rank() == 0 ? parts.first : parts.second).backward();
      for (const at::Tensor& gradient : sharded->full_gradients())
        EXPECT_TRUE(gradient.eq(parts.sum).all().item<bool>()) << parts.first << " and " << parts.second;
      sharded->zero_grad();
    }
  });
}

TEST(GradientWire, Case02WhatCannotTravelInBf16SaysSo) {
  const auto refused = [](const runtime::Options& options) {
    run_watched_ranks(1, [&](comm::PeerGroup& group) {
      const auto small = std::make_shared<Small>(at::kFloat);
      const std::vector<std::shared_ptr<torch::nn::Module>> units;
      EXPECT_THROW(static_cast<void>(watched_shard(group, small, units, options)), UsageError);
    });
  };
  refused({.strategy = Strategy::no_shard, .wire_dtype = at::kBFloat16});
  refused({.strategy = Strategy::optim, .wire_dtype = at::kBFloat16});
  refused({.wire_dtype = at::kHalf});
}

INSTANTIATE_TEST_SUITE_P(Small, GradientCases,
                         testing::Combine(testing::ValuesIn(runtime::kStrategies), testing::Bool()),
                         case_name);

TEST_P(GradientCases, Case02Bf16MicrobatchesAddInFp32) {  // 256 + 1 is 256 in bf16
  for (const int ranks : {1, 2, 3}) {
    run_watched_ranks(ranks, [&](comm::PeerGroup& group) {
      const Model model = make(group, at::kBFloat16, ranks == 3 ? Combine::sum : Combine::mean);
      const double share = ranks == 3 ? 3 : 1;
      for (const bool set_to_none : {true, false}) {
        {
          const auto scope = model.sharded->microbatch(false);
          model.backward(256);
        }
        {
          const auto scope = model.sharded->microbatch(true);
          model.backward(1);
        }
        expect_all(model, 257 * share, "in a window");
        model.sharded->zero_grad(set_to_none);
        model.backward(256);
        model.backward(1);
        expect_all(model, 257 * share, "over two windows");
        model.sharded->zero_grad(set_to_none);
      }
    });
  }
}

TEST_P(GradientCases, Case03SmallAndLargeOfTwoRanksSurviveTheReduce) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const Combine combine : {Combine::sum, Combine::mean}) {
      run_watched_ranks(2, [&](comm::PeerGroup& group) {
        const Model model = make(group, dtype, combine);
        model.backward(group.rank() == 0 ? 1 : std::ldexp(1.0, -9));
        expect_all(model, (1 + std::ldexp(1.0, -9)) * (combine == Combine::mean ? 0.5 : 1), "of two ranks");
      });
    }
  }
}

TEST_P(GradientCases, Case05OneRankAddsNeitherCopiesNorRescales) {
  for (const Combine combine : {Combine::sum, Combine::mean}) {
    run_watched_ranks(1, [&](comm::PeerGroup& group) {
      const Model model = make(group, at::kFloat, combine);
      for (int i = 1; i <= 4; ++i) {
        model.backward(3);
        expect_all(model, 3 * i, text("after backward ", i));
      }
      model.sharded->zero_grad();
      for (const at::Tensor& shard : model.sharded->shards()) EXPECT_FALSE(shard.grad().defined());
      model.backward(5);
      expect_all(model, 5, "after zero_grad");
    });
  }
}

TEST_P(GradientCases, SeveralRanksAddToWhatIsThere) {
  run_watched_ranks(4, [&](comm::PeerGroup& group) {
    const Model model = make(group, at::kFloat, Combine::mean);
    const double mean = 1.5;  // of the ranks' numbers
    for (int i = 1; i <= 3; ++i) {
      model.backward(group.rank());
      expect_all(model, mean * i, text("after backward ", i));
    }
  });
}

TEST_P(GradientCases, Case07RetainedGraphGivesTwice) {
  run_watched_ranks(2, [&](comm::PeerGroup& group) {
    const Model model = make(group, at::kFloat, Combine::sum);
    const at::Tensor loss = call(*model.small, 1.0 + group.rank());
    loss.backward({}, /*retain_graph=*/true);
    expect_all(model, 3, "once");
    loss.backward();
    expect_all(model, 6, "twice");
  });
}

// The gradient of an earlier window is in place when the next window opens, and stays in the sum.
TEST_P(GradientCases, WindowAddsToTheWindowBefore) {
  run_watched_ranks(2, [&](comm::PeerGroup& group) {
    const Model model = make(group, at::kFloat, Combine::sum);
    model.backward(1);
    {
      const auto scope = model.sharded->microbatch(false);
      model.backward(10);
    }
    {
      const auto scope = model.sharded->microbatch(true);
      model.backward(100);
    }
    expect_all(model, 222, "of three backwards on two ranks");
  });
}

// zero_grad, the model's or a foreign optimizer's, closes an open window: nothing of before it comes back,
// not even what an earlier window had reduced.
TEST_P(GradientCases, ZeroGradInsideAWindowDropsEverything) {
  const auto foreign_zero_grad = [](const ShardedModel& model, bool set_to_none) {
    for (at::Tensor shard : model.shards()) {
      if (set_to_none) {
        shard.mutable_grad().reset();
      } else {
        shard.mutable_grad().zero_();
      }
    }
  };
  for (const bool set_to_none : {true, false}) {
    for (const bool foreign : {true, false}) {
      run_watched_ranks(2, [&](comm::PeerGroup& group) {
        const Model model = make(group, at::kFloat, Combine::sum);
        model.backward(1);
        {
          const auto scope = model.sharded->microbatch(false);
          model.backward(10);
        }
        if (foreign) {
          foreign_zero_grad(*model.sharded, set_to_none);
        } else {
          model.sharded->zero_grad(set_to_none);
        }
        {
          const auto scope = model.sharded->microbatch(true);
          model.backward(100);
        }
        expect_all(model, 200, text("after zero_grad(", set_to_none, ")"));
      });
    }
  }
}

// A gradient that one rank lacks is no gradient of the whole, and every rank says so.
TEST_P(GradientCases, FullGradientsAreUndefinedWhereOneRankHasNone) {
  run_watched_ranks(3, [&](comm::PeerGroup& group) {
    const Model model = make(group, at::kFloat, Combine::sum);
    for (const at::Tensor& gradient : model.sharded->full_gradients()) EXPECT_FALSE(gradient.defined());
    model.backward(1);
    if (group.rank() == 1) model.sharded->shards().at(2).mutable_grad().reset();
    const std::vector<at::Tensor> gradients = model.sharded->full_gradients();
    for (std::size_t i = 0; i < gradients.size(); ++i) EXPECT_EQ(gradients[i].defined(), i != 2) << i;
  });
}

}  // namespace
}  // namespace fsdpp
