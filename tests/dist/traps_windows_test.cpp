// The traps of windows: which gradients and weights count when windows are cut short, left over, or raise.
#include <ATen/ops/sum.h>
#include <c10/core/InferenceMode.h>

#include <array>

#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/clip.h"
#include "fsdpp/trace/recorder.h"
#include "tests/dist/traps.h"

namespace fsdpp::test::traps {
namespace {

using device::OperationKind;

class TrapWindows : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Strategies, TrapWindows, all_ranks(), parameters_name);

TEST_P(TrapWindows, Case29EvaluationBetweenBackwardAndStepChangesNothing) {
  for (const bool promised : {false, true}) {
    for (const bool inference : {false, true}) {
      run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
        const Sharded made = shard(group, 3, options());
        if (promised) made.model->promise_to_tell();
        SmallNet oracle(3, kDim, Layers::oracle);
        const auto evaluate = [&](const char* when) {
          const c10::InferenceMode mode(inference);
          const at::NoGradGuard no_grad;
          for (const int64_t rows : {1, 5}) {
            const at::Tensor input = small_batch(kDim, group.rank(), 9, rows);
            expect_same(made.net->run(input), oracle.run(input), when);
          }
        };
        for (int step = 0; step < 2; ++step) {
          evaluate("before the backward");
          backward(made, group.rank(), step);
          oracle_backward(oracle, all_batches(kDim, ranks(), step));
          evaluate("between backward and step");
          expect_gradients(*made.model, oracle);
          integer_step(made.model->shards());
          if (promised) made.model->weights_changed();
          integer_step(oracle.parameters());
          evaluate("after the step");
          made.model->zero_grad();
          clear(oracle);
        }
      });
    }
  }
}

TEST_P(TrapWindows, BackwardBackwardStepAddsBoth) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const Sharded made = shard(group, 3, options());
    SmallNet oracle(3, kDim, Layers::oracle);
    for (int index = 0; index < 2; ++index) {
      backward(made, group.rank(), index);
      oracle_backward(oracle, all_batches(kDim, ranks(), index));
    }
    expect_gradients(*made.model, oracle);
    integer_step(made.model->shards());
    integer_step(oracle.parameters());
    expect_weights(*made.model, oracle);
  });
}

// The optimizer says nothing, and every backward is in a declared window: the next window sees what it wrote.
TEST_P(TrapWindows, DeclaredWindowsSeeAStepThatNobodyAnnounced) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const Sharded made = shard(group, 2, options());
    SmallNet oracle(2, kDim, Layers::oracle);
    for (int step = 0; step < 2; ++step) {
      for (int index = 0; index < 2; ++index) {
        const auto scope = made.model->microbatch(index == 1);
        const at::Tensor input = small_batch(kDim, group.rank(), index);
        const at::Tensor output = made.net->run(input);
        expect_same(output.detach(), oracle.run(input).detach(), text("output of step ", step, ", ", index));
        small_loss(output).backward();
        oracle_backward(oracle, all_batches(kDim, ranks(), index));
      }
      expect_gradients(*made.model, oracle);
      integer_step(made.model->shards());
      integer_step(oracle.parameters());
      made.model->zero_grad();
      clear(oracle);
    }
  });
}

// How gradients are thrown away: by the model, or by an optimizer that only knows the shards.
struct Zeroing {
  bool to_none;
  bool foreign;
};

void zero(ShardedModel& model, Zeroing how) {
  if (!how.foreign) return model.zero_grad(how.to_none);
  const at::NoGradGuard no_grad;
  for (const at::Tensor& shard : model.shards()) {
    at::Tensor& gradient = shard.mutable_grad();
    if (!gradient.defined()) continue;
    if (how.to_none) {
      gradient.reset();
    } else {
      gradient.zero_();
    }
  }
}

// zero_grad after a whole window, in the middle of one, and in the middle of one that began with gradients
// left over.
TEST_P(TrapWindows, ASkippedStepLosesAndLeaksNothing) {
  for (const Zeroing how : {Zeroing{true, false}, {false, false}, {true, true}, {false, true}}) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const Sharded made = shard(group, 2, options());
      const auto pass = [&](int index, bool last) {
        const auto scope = made.model->microbatch(last);
        backward(made, group.rank(), index);
      };
      const auto expect_only = [&](std::initializer_list<int> indices, const char* what) {
        SCOPED_TRACE(text(what, how.to_none ? ", to none" : ", to zero", how.foreign ? ", foreign" : ""));
        SmallNet oracle(2, kDim, Layers::oracle);
        for (const int index : indices) oracle_backward(oracle, all_batches(kDim, ranks(), index));
        expect_gradients(*made.model, oracle);
      };
      pass(0, true);
      zero(*made.model, how);
      pass(1, true);
      expect_only({1}, "a whole window skipped");
      zero(*made.model, how);

      pass(2, false);
      zero(*made.model, how);
      pass(3, false);
      pass(4, true);
      expect_only({3, 4}, "skipped in the middle of a window");

      pass(5, false);
      pass(6, true);
      expect_only({3, 4, 5, 6}, "nothing was zeroed: windows add up");

      pass(7, false);
      zero(*made.model, how);
      pass(8, true);
      expect_only({8}, "skipped in the middle of a window that began with gradients");
    });
  }
}

// Steps that are skipped publish nothing: that peers have read a gradient is known from the gradient's own
// signals.
TEST_P(TrapWindows, WindowsWithoutAStepBetween) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const Sharded made = shard(group, 2, options());
    made.model->promise_to_tell();
    for (int window = 0; window < 4; ++window) {
      for (int index = 0; index < 2; ++index) {
        const auto scope = made.model->microbatch(index == 1);
        backward(made, group.rank(), 2 * window + index);
      }
      SmallNet oracle(2, kDim, Layers::oracle);
      for (int index = 0; index < 2; ++index)
        oracle_backward(oracle, all_batches(kDim, ranks(), 2 * window + index));
      expect_gradients(*made.model, oracle);
      made.model->zero_grad();
    }
    EXPECT_EQ(made.model->counters().publications, 1);
  });
}

// Whatever the user makes of a gradient in the middle of a window counts; where it is a part of what this
// rank has accumulated, a change could not reach the rest, and is refused.
TEST_P(TrapWindows, GradientsScaledInTheMiddleOfAWindowCount) {
  for (const bool replaced : {false, true}) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const Sharded made = shard(group, 2, options());
      SmallNet oracle(2, kDim, Layers::oracle);
      for (int index = 0; index < 2; ++index) {
        const auto scope = made.model->microbatch(index == 1);
        if (index == 1 && (strategy() == Strategy::optim || parted())) {
          bool shows = false;  // half of nothing is nothing
          for (const at::Tensor& shard : made.model->shards())
            shows = shows || (replaced ? shard.numel() > 0 : shard.grad().any().item<bool>());
          const auto again = [&] { backward(made, group.rank(), index); };
          if (!shows) again();
          if (shows) expect_in(thrown_text(again), "between a window's backwards");
          made.model->zero_grad();
          return;
        }
        backward(made, group.rank(), index);
        oracle_backward(oracle, all_batches(kDim, ranks(), index));
        if (index == 1) continue;
        const at::NoGradGuard no_grad;
        const auto halve = [&](const at::Tensor& weight) {
          at::Tensor& gradient = weight.mutable_grad();
          if (replaced) {
            gradient = gradient * 0.5;
          } else {
            gradient.mul_(0.5);
          }
        };
        for (const at::Tensor& shard : made.model->shards()) halve(shard);
        for (const at::Tensor& weight : oracle.parameters()) halve(weight);
      }
      expect_gradients(*made.model, oracle);
    });
  }
}

// A gradient that the user kept while its shard's was cleared is his: the next backward does not write there.
TEST_P(TrapWindows, AGradientTheUserKeepsIsNotWritten) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const Sharded made = shard(group, 2, options());
    backward(made, group.rank(), 0);
    std::vector<at::Tensor> kept, copies;
    for (std::size_t i = 0; i < made.model->shards().size(); i += 2) {  // every other one stays in place
      at::Tensor& gradient = made.model->shards()[i].mutable_grad();
      kept.push_back(gradient);
      copies.push_back(gradient.clone());
      gradient.reset();
    }
    backward(made, group.rank(), 1);
    // Elsewhere gradients lie where they are added up, as documented: clone to keep.
    if (!reduces_every_backward() || hybrid()) return;
    for (std::size_t i = 0; i < kept.size(); ++i) expect_same(kept[i], copies[i], text("kept gradient ", i));
  });
}

// Gradients of complete units are reduced, those of the others are not: neither may leak into the next step.
TEST_P(TrapWindows, ABackwardThatRaisesIsForgottenByZeroGrad) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const Sharded made = shard(group, 4, options());
    const std::array ways = {Zeroing{true, false}, Zeroing{false, false}, Zeroing{true, true},
                             Zeroing{false, true}};
    for (std::size_t step = 0; step < ways.size(); ++step) {
      // Its gradients lie where peers still read: only the model knows when that is over.
      if ((!reduces_every_backward() || hybrid()) && ways.at(step).foreign) continue;
      if (step % 2 == 1) backward(made, group.rank(), 5);  // gradients left over, to be cleared with the rest
      made.net->side_of = 1;
      const at::Tensor loss = small_loss(made.net->run(small_batch(kDim, group.rank(), 7)));
      made.net->side.register_hook([](const at::Tensor&) { throw std::runtime_error("half-way"); });
      EXPECT_THROW(loss.backward(), std::exception);
      zero(*made.model, ways.at(step));
      backward(made, group.rank(), static_cast<int>(step));
      SmallNet oracle(4, kDim, Layers::oracle);
      oracle_backward(oracle, all_batches(kDim, ranks(), static_cast<int>(step)));
      expect_gradients(*made.model, oracle);
      EXPECT_TRUE(made.model->at_rest());
      made.model->zero_grad();
    }
  });
}

// It is given up when its scope is gone: as it was declared, whatever the next one is. Nobody but the ranks
// that reduce waits for it.
TEST_P(TrapWindows, ABackwardThatRaisesEndsAsItWasDeclared) {
  for (const bool last : {false, true}) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const Sharded made = shard(group, 4, options());
      trace::Recorder recorder;
      made.model->device().observe(&recorder);
      {
        const auto scope = made.model->microbatch(last);
        made.net->side_of = 1;
        const at::Tensor loss = small_loss(made.net->run(small_batch(kDim, group.rank(), 7)));
        made.net->side.register_hook([](const at::Tensor&) { throw std::runtime_error("half-way"); });
        EXPECT_THROW(loss.backward(), std::exception);
      }
      made.net->side_of = -1;
      {
        const auto scope = made.model->microbatch(!last);
        static_cast<void>(made.net->run(small_batch(kDim, group.rank(), 7)));
      }
      const bool reduces = last || reduces_every_backward();
      EXPECT_EQ(recorder.count(OperationKind::signal, "ready root"), reduces ? 1U : 0U);
      made.model->device().unobserve(&recorder);
      made.model->zero_grad();
      SmallNet oracle(4, kDim, Layers::oracle);
      for (int index = 0; index < 2; ++index) {
        const auto scope = made.model->microbatch(index == 1);
        backward(made, group.rank(), index);
        oracle_backward(oracle, all_batches(kDim, ranks(), index));
      }
      expect_gradients(*made.model, oracle);
    });
  }
}

// What was opened for a first contribution that raised is nobody's gradient: neither bytes of the window
// before nor anything else reaches a peer whose own backward ended well.
TEST_P(TrapWindows, AFirstWriteThatRaisesLeavesNoBytes) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const Sharded made = shard(group, 2, options(), Layers::unfused);
    const auto owner = runtime::sink_of(made.net->first->weight);
    backward(made, group.rank(), 0);
    made.model->zero_grad();
    const at::Tensor loss = small_loss(made.net->run(small_batch(kDim, group.rank(), 1)));
    const auto hook = made.net->last->weight.register_hook([&](const at::Tensor&) -> at::Tensor {
      if (owner->open()) throw std::runtime_error("no room for the product");
      return {};
    });
    EXPECT_THROW(loss.backward(), std::exception);
    made.net->last->weight.remove_hook(hook);
    static_cast<void>(made.net->run(small_batch(kDim, group.rank(), 1)));  // gives it up
    const std::vector<at::Tensor> gradients = made.model->full_gradients();
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (made.model->parameters()[i].first != "first.weight" || !gradients[i].defined()) continue;
      EXPECT_FALSE(gradients[i].any().item<bool>()) << gradients[i];
    }
  });
}

// A change that is refused by a unit's reduce, not by a contribution: the ranks stay in step.
TEST_P(TrapWindows, ARefusedReduceCanBeClearedAway) {
  const bool refuses = strategy() == Strategy::optim || parted();
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const Sharded made = shard(group, 3, options());
    {
      const auto scope = made.model->microbatch(false);
      backward(made, group.rank(), 0);
    }
    if (refuses) {
      const auto names = made.model->parameters();
      bool shows = false;  // a part of it lies here
      for (std::size_t i = 0; i < names.size(); ++i) {
        if (!names[i].first.starts_with("block1.")) continue;
        at::Tensor& gradient = made.model->shards()[i].mutable_grad();
        shows = shows || gradient.numel() > 0;
        gradient = gradient + 1;
      }
      made.net->skipped = {1};
      const auto again = [&] { backward(made, group.rank(), 1); };
      if (shows) expect_in(thrown_text([&] { again(); }), "between a window's backwards");
      if (!shows) again();
    }
    made.net->skipped = {};
    made.model->zero_grad();
    backward(made, group.rank(), 2);
    SmallNet oracle(3, kDim, Layers::oracle);
    oracle_backward(oracle, all_batches(kDim, ranks(), 2));
    expect_gradients(*made.model, oracle);
  });
}

// A step on gradients whose window is not over would take this rank's sum for everybody's.
TEST_P(TrapWindows, StepsOnIncompleteGradientsAreRefused) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const Sharded made = shard(group, 2, options());
    optim::AdamW optimizer(*made.model, {});
    {
      const auto scope = made.model->microbatch(false);
      backward(made, group.rank(), 0);
    }
    if (!reduces_every_backward() || hybrid()) {
      expect_in(thrown_text([&] { optimizer.step(1e-3); }), "AdamW: the gradient of");
      expect_in(thrown_text([&] { static_cast<void>(optim::clip_grad_norm(*made.model, 1.0)); }),
                "microbatch(true)");
      expect_in(thrown_text([&] { static_cast<void>(made.model->full_gradients()); }), "not complete");
    }
    backward(made, group.rank(), 1);
    EXPECT_NO_THROW(optimizer.step(1e-3));
  });
}

}  // namespace
}  // namespace fsdpp::test::traps
