// Backwards that are not one after another: delayed weight gradients, recompute, and schedules by hand.
#include <ATen/ops/allclose.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/rand.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>

#include "fsdpp/nn/recompute.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/trace/recorder.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::cases_schedules_test {
namespace {

using device::OperationKind;
using nn::Recompute;

constexpr int64_t kDim = 8;
constexpr int kGroups = 4;  // three blocks and the root

class CasesOfSchedules : public OnRanks {
 public:
  static std::shared_ptr<ShardedModel> shard(comm::PeerGroup& group, const std::shared_ptr<SmallNet>& net,
                                             bool delayed = false) {
    Options chosen = options();
    chosen.delay_wgrad = delayed;
    return watched_shard(group, net, net->units(), chosen);
  }
};
INSTANTIATE_TEST_SUITE_P(Strategies, CasesOfSchedules, all_ranks(), parameters_name);

void backward(SmallNet& net, int rank, int index = 0) {
  small_loss(net.run(small_batch(kDim, rank, index))).backward();
}

std::size_t reduces(const trace::Recorder& recorder) {
  return recorder.count(OperationKind::signal, "ready ") -
         recorder.count(OperationKind::signal, "ready replicas' ");
}

TEST_P(CasesOfSchedules, Case17WeightGradientsDelayedAfterTheBackward) {
  for (const Layers layers : {Layers::fused, Layers::unfused}) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(3, kDim, layers);
      const auto model = shard(group, net, /*delayed=*/true);
      SmallNet oracle(3, kDim, Layers::oracle);
      trace::Recorder recorder;
      model->device().observe(&recorder);
      int64_t spills = 0;
      for (int step = 0; step < 6; ++step) {
        recorder.clear();
        backward(*net, group.rank(), step);
        EXPECT_EQ(reduces(recorder), 0U) << "nothing is reduced before";
        EXPECT_EQ(recorder.count(OperationKind::run, "wgrad "), 0U);
        expect_in(thrown_text([&] { static_cast<void>(model->full_gradients()); }), "backward_dw()");
        model->backward_dw();
        EXPECT_EQ(reduces(recorder), static_cast<std::size_t>(kGroups)) << "each group once";
        oracle_backward(oracle, all_batches(kDim, ranks(), step));
        expect_gradients(*model, oracle);
        model->zero_grad();
        clear(oracle);
        if (step == 3) spills = model->counters().spills;
      }
      EXPECT_EQ(model->counters().spills, spills) << "slots are planned for how they were used";
      model->device().unobserve(&recorder);
    });
  }
}

// Two backwards of a zero-bubble pipeline before the first one's weight gradients; units in any order.
TEST_P(CasesOfSchedules, Case17SeveralBackwardsAreReducedOnceAsTheirSum) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = shard(group, net, /*delayed=*/true);
    SmallNet oracle(3, kDim, Layers::oracle);
    trace::Recorder recorder;
    model->device().observe(&recorder);
    const std::array<std::array<int, 3>, 4> orders = {{{0, 1, 2}, {2, 0, 1}, {1, 2, 0}, {2, 1, 0}}};
    for (int step = 0; step < 4; ++step) {
      recorder.clear();
      {
        const auto scope = model->microbatch(false);
        backward(*net, group.rank(), 3 * step);
      }
      const auto scope = model->microbatch(true);
      backward(*net, group.rank(), 3 * step + 1);
      for (const int block : orders[static_cast<std::size_t>(step)])
        model->backward_dw(*net->blocks[static_cast<std::size_t>(block)]);
      model->backward_dw(*net);
      EXPECT_EQ(reduces(recorder), static_cast<std::size_t>(kGroups));
      for (const int index : {3 * step, 3 * step + 1})
        oracle_backward(oracle, all_batches(kDim, ranks(), index));
      expect_gradients(*model, oracle);
      model->zero_grad();
      clear(oracle);
    }
    model->device().unobserve(&recorder);
  });
}

TEST_P(CasesOfSchedules, Case17WhatIsHalfDoneIsRefusedByName) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = shard(group, net, /*delayed=*/true);
    SmallNet oracle(3, kDim, Layers::oracle);
    optim::AdamW adamw(*model, {});
    const auto scope = model->microbatch(true);
    backward(*net, group.rank(), 0);
    expect_in(thrown_text([&] { static_cast<void>(adamw.step(0.1)); }), "backward_dw()");
    model->backward_dw(*net->blocks[2]);
    const at::Tensor loss = small_loss(net->run(small_batch(kDim, group.rank(), 1)));
    if (sharded() && reduces_every_backward()) {
      expect_in(thrown_text([&] { loss.backward(); }), "backward_dw()");
    }
    expect_in(thrown_text([&] { model->backward_dw(*net->first); }), "no unit of this model");
    model->backward_dw();
    model->backward_dw();  // nothing is left
    oracle_backward(oracle, all_batches(kDim, ranks(), 0));
    expect_gradients(*model, oracle);
  });
}

// A backward that raises drops its own; what was delayed before it stays.
TEST_P(CasesOfSchedules, ADelayedBackwardThatRaisesLeavesTheOneBeforeItWhole) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = shard(group, net, /*delayed=*/true);
    SmallNet oracle(3, kDim, Layers::oracle);
    const auto scope = model->microbatch(true);
    backward(*net, group.rank(), 0);
    const at::Tensor output = net->run(small_batch(kDim, group.rank(), 1));
    at::Tensor loss = small_loss(output);
    net->blocks[0]->up->weight.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the hook was told to raise"); });
    expect_in(thrown_text<std::exception>([&] { loss.backward(); }), "told to raise");
    model->zero_grad();
    model->backward_dw();
    oracle_backward(oracle, all_batches(kDim, ranks(), 0));
    expect_gradients(*model, oracle);
  });
}

TEST_P(CasesOfSchedules, Case19RecomputeGathersTwiceAndLeavesNothingBehind) {
  for (const Recompute how : {Recompute::reentrant, Recompute::non_reentrant}) {
    for (const bool delayed : {false, true}) {
      run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
        const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
        net->recompute = how;
        const auto model = shard(group, net, delayed);
        SmallNet oracle(3, kDim, Layers::oracle);
        int64_t gathers = 0;
        for (int step = 0; step < 4; ++step) {
          SCOPED_TRACE(text(nn::to_string(how), delayed ? ", delayed" : "", ", step ", step));
          backward(*net, group.rank(), step);
          EXPECT_TRUE(model->at_rest() || !shards_parameters(strategy()));
          if (delayed) model->backward_dw();
          oracle_backward(oracle, all_batches(kDim, ranks(), step));
          expect_gradients(*model, oracle);
          model->weights_changed();
          model->zero_grad();
          clear(oracle);
          const int64_t all = model->counters().gathers;
          // In forward and backward, but for the root and the last block, which stay in between.
          const bool again = shards_parameters(strategy()) && step > 0;
          EXPECT_EQ(all - gathers, again ? 2 * kGroups - 2 : all - gathers);
          gathers = all;
        }
        EXPECT_EQ(model->counters().on_demand_gathers, 0);
        EXPECT_TRUE(delayed || model->counters().spills == 0)
            << "each slot is taken at its unit's own backward";
        EXPECT_EQ(model->counters().weight_overflows, 0);
      });
    }
  }
}

// Around several units, inside one another, of both kinds, and under autograd::grad.
TEST_P(CasesOfSchedules, Case19RecomputeAroundSeveralUnitsAndNested) {
  for (const Recompute outer : {Recompute::reentrant, Recompute::non_reentrant}) {
    for (const Recompute inner : {Recompute::none, Recompute::reentrant}) {
      run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
        const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
        const auto model = shard(group, net);
        SmallNet oracle(3, kDim, Layers::oracle);
        const auto run = [&](const at::Tensor& batch) {
          return call_as(*net, [&] {
            const auto block = [net](std::size_t i) {
              return [net, i](const at::Tensor& x) { return fsdpp::call(*net->blocks[i], x); };
            };
            const at::Tensor first = net->first->forward(batch);
            const auto two = [inner, block](const at::Tensor& x) {
              return nn::recompute(inner, block(1), block(0)(x));
            };
            const at::Tensor middle = nn::recompute(outer, two, first);
            return net->last->forward(block(2)(middle));
          });
        };
        for (int step = 0; step < 3; ++step) {
          small_loss(run(small_batch(kDim, group.rank(), step))).backward();
          oracle_backward(oracle, all_batches(kDim, ranks(), step));
          expect_gradients(*model, oracle);
          model->zero_grad();
          clear(oracle);
        }
        if (outer == Recompute::non_reentrant && inner == Recompute::none) {
          const at::Tensor loss = small_loss(run(small_batch(kDim, group.rank(), 0)));
          const auto got = torch::autograd::grad({loss}, {net->blocks[1]->up->weight}, {}, /*retain=*/true);
          loss.backward();  // a second one through what is recomputed anew
          const at::Tensor its = small_loss(oracle.run(small_batch(kDim, group.rank(), 0)));
          expect_same(got[0], torch::autograd::grad({its}, {oracle.blocks[1]->up->weight})[0], "captured");
          oracle_backward(oracle, all_batches(kDim, ranks(), 0));
          expect_gradients(*model, oracle);
        }
        EXPECT_TRUE(model->at_rest() || !shards_parameters(strategy()));
      });
    }
  }
}

TEST(RecomputeAlone, DrawsTheSameNumbersAgainAndSaysWhatItCannotDo) {
  for (const Recompute how : {Recompute::reentrant, Recompute::non_reentrant}) {
    const at::Tensor input = integers({4, 5}, 3).requires_grad_();
    const auto body = [](const at::Tensor& x) { return (x * at::rand({4, 5}, x.options())).pow(2); };
    const at::Tensor output = nn::recompute(how, body, input);
    const at::Tensor drawn = (output / (input * input)).detach();  // of which NaN where the input is 0
    const at::Tensor next = at::rand({1});
    output.sum().backward();
    const at::Tensor expected = at::nan_to_num(2 * input.detach() * drawn);
    EXPECT_TRUE(at::allclose(input.grad(), expected)) << nn::to_string(how);
    EXPECT_FALSE(at::rand({1}).equal(next)) << "the generator goes on where it was";
  }
  expect_in(thrown_text([] {
              static_cast<void>(nn::recompute(
                  Recompute::reentrant, [](const at::Tensor& x) { return x; }, integers({2}, 1)));
            }),
            "non_reentrant");
  int runs = 0;
  const at::Tensor input = integers({2}, 1).requires_grad_();
  const at::Tensor changing = nn::recompute(
      Recompute::non_reentrant, [&](const at::Tensor& x) { return runs++ == 0 ? at::relu(x * x) : x + 1; },
      input);
  expect_in(thrown_text<std::exception>([&] { changing.sum().backward(); }), "the same each time");
  expect_in(thrown_text([] { static_cast<void>(nn::recompute_from("all")); }), "non_reentrant");
}

// Gradients add up in slots over several backwards; the caller says when each unit is reduced.
TEST_P(CasesOfSchedules, ReducesByHandComeWhenTheCallerSays) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = shard(group, net);
    SmallNet oracle(3, kDim, Layers::oracle);
    trace::Recorder recorder;
    model->device().observe(&recorder);
    expect_in(thrown_text([&] { model->reduce(*net); }), "reduce_by_hand(true)");
    model->reduce_by_hand(true);
    for (int step = 0; step < 3; ++step) {
      recorder.clear();
      {
        const auto scope = model->microbatch(true);
        backward(*net, group.rank(), 2 * step);
        backward(*net, group.rank(), 2 * step + 1);
        EXPECT_EQ(reduces(recorder), 0U);
        expect_in(thrown_text([&] { static_cast<void>(model->full_gradients()); }), "finish_reduces()");
        model->reduce(*net->blocks[2]);
        model->reduce(*net->blocks[1]);
        model->finish_reduces();
      }
      EXPECT_EQ(reduces(recorder), static_cast<std::size_t>(kGroups));
      for (const int index : {2 * step, 2 * step + 1})
        oracle_backward(oracle, all_batches(kDim, ranks(), index));
      expect_gradients(*model, oracle);
      integer_step(model->shards());
      integer_step(oracle.parameters());
      model->zero_grad();
      clear(oracle);
    }
    model->reduce_by_hand(false);
    backward(*net, group.rank(), 9);
    oracle_backward(oracle, all_batches(kDim, ranks(), 9));
    expect_gradients(*model, oracle);
    model->device().unobserve(&recorder);
  });
}

// A pipeline's split backward: first the input's gradient alone, then the weights', found in their `.grad`;
// and one that the caller computed, put into a slot that was taken by hand.
TEST_P(CasesOfSchedules, SplitBackwardTakesWhatIsFoundInFullWeights) {
  for (const Layers layers : {Layers::fused, Layers::unfused}) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(3, kDim, layers);
      const auto model = shard(group, net);
      SmallNet oracle(3, kDim, Layers::oracle);
      model->reduce_by_hand(true);
      for (int step = 0; step < 3; ++step) {
        const auto scope = model->microbatch(true);
        at::Tensor given = integers({kDim, kDim}, 11 + static_cast<uint64_t>(group.rank()));
        for (const int index : {2 * step, 2 * step + 1}) {
          const at::Tensor input = small_batch(kDim, group.rank(), index).requires_grad_();
          const at::Tensor loss = small_loss(net->run(input));
          const at::Tensor input_gradient = torch::autograd::grad({loss}, {input}, {}, /*retain=*/true)[0];
          const at::Tensor its = small_batch(kDim, group.rank(), index).requires_grad_();
          const at::Tensor oracle_loss = small_loss(oracle.run(its));
          expect_same(input_gradient, torch::autograd::grad({oracle_loss}, {its})[0], "input's gradient");
          const auto weights = net->parameters();
          const auto gradients = torch::autograd::grad({loss}, weights);
          const at::NoGradGuard no_grad;
          for (std::size_t i = 0; i < weights.size(); ++i) {
            at::Tensor& found = weights[i].mutable_grad();
            found = found.defined() ? found + gradients[i] : gradients[i];
          }
        }
        if (layers == Layers::fused) {
          const auto owner = runtime::sink_of(net->blocks[0]->up->weight);
          const auto sink = owner->open();
          ASSERT_TRUE(sink.has_value());
          const at::NoGradGuard no_grad;
          if (sink->mode == runtime::GradSink::Mode::add) {
            sink->view.add_(given);
          } else {
            sink->view.copy_(given);
          }
          owner->report();
        }
        for (int block = 2; block >= 0; --block) model->reduce(*net->blocks[static_cast<std::size_t>(block)]);
        model->finish_reduces();
        for (const int index : {2 * step, 2 * step + 1})
          oracle_backward(oracle, all_batches(kDim, ranks(), index));
        if (layers == Layers::fused) {
          for (int rank = 0; rank < ranks(); ++rank) {
            const at::NoGradGuard no_grad;
            oracle.blocks[0]->up->weight.mutable_grad().add_(
                integers({kDim, kDim}, 11 + static_cast<uint64_t>(rank)));
          }
        }
        expect_gradients(*model, oracle);
        model->zero_grad();
        clear(oracle);
      }
    });
  }
}

// What a user holds is gathered once and stays until it is let go.
TEST_P(CasesOfSchedules, AUnitHeldByHandIsNotGatheredAgain) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = shard(group, net);
    SmallNet oracle(3, kDim, Layers::oracle);
    model->promise_to_tell();
    model->gather(*net->blocks[1]);
    expect_same(net->blocks[1]->up->weight.detach(), oracle.blocks[1]->up->weight.detach(), "held weight");
    const int64_t before = model->counters().gathers;
    backward(*net, group.rank());
    if (shards_parameters(strategy())) {
      EXPECT_EQ(model->counters().gathers - before, 2 * kGroups - 2 - 2) << "all others twice, as ever";
      EXPECT_FALSE(model->at_rest());
    }
    model->release(*net->blocks[1]);
    EXPECT_TRUE(model->at_rest() || !shards_parameters(strategy()));
    oracle_backward(oracle, all_batches(kDim, ranks()));
    expect_gradients(*model, oracle);
  });
}

}  // namespace
}  // namespace fsdpp::test::cases_schedules_test
