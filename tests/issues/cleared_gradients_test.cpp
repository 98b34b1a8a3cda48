// Gradients that were cleared, or given up, and came back; and such that were kept, and went.
#include <functional>
#include <stdexcept>
#include <vector>

#include "tests/support/hazard_watch.h"
#include "tests/support/row_model.h"

namespace fsdpp::test::cleared_gradients_test {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kDim = 5;

// How gradients are cleared: by the model, or by an optimizer that only knows the shards.
using Clear = std::function<void(ShardedModel&)>;

std::vector<Clear> all_clears() {
  const auto foreign = [](bool none) {
    return [none](ShardedModel& model) {
      for (const at::Tensor& shard : model.shards()) {
        at::Tensor& gradient = shard.mutable_grad();
        if (!gradient.defined()) continue;
        if (none) {
          gradient.reset();
        } else {
          gradient.zero_();
        }
      }
    };
  };
  return {[](ShardedModel& model) { model.zero_grad(true); },
          [](ShardedModel& model) { model.zero_grad(false); }, foreign(true), foreign(false)};
}

struct Training {
  comm::PeerGroup& group;
  std::shared_ptr<SmallNet> net;
  std::shared_ptr<ShardedModel> model;

  Training(comm::PeerGroup& ranks, const Options& options, Layers layers = Layers::fused)
      : group(ranks),
        net(std::make_shared<SmallNet>(2, kDim, layers)),
        model(watched_shard(group, net, net->units(), options)) {}

  void backward(int index) const { small_loss(net->run(small_batch(kDim, group.rank(), index))).backward(); }
  void microbatch(int index, bool last) const {
    const auto scope = model->microbatch(last);
    backward(index);
  }
  void raise(int index) const {
    net->side_of = 0;
    const at::Tensor loss = small_loss(net->run(small_batch(kDim, group.rank(), index)));
    net->side.register_hook([](const at::Tensor&) { throw std::runtime_error("half-way"); });
    expect_in(thrown_text<std::exception>([&] { loss.backward(); }), "half-way");
    net->side_of = -1;
  }
  void expect_sum_of(const std::vector<int>& indices) const {
    SmallNet oracle(2, kDim, Layers::oracle);
    for (const int index : indices) oracle_backward(oracle, all_batches(kDim, kRanks, index));
    expect_gradients(*model, oracle);
  }
};

Options offloaded(Strategy strategy) {
  return {.strategy = strategy, .combine = Combine::sum, .offload = true};
}

template <class Body>
void with_offload(Body body) {
  for (const Strategy strategy : {Strategy::optim, Strategy::optim_grads, Strategy::optim_grads_params}) {
    for (const int replicas : {1, 2}) {
      SCOPED_TRACE(text(runtime::to_string(strategy), ", ", replicas, " replicas"));
      watch_replicas(replicas);
      run_watched_ranks(kRanks, [&](comm::PeerGroup& group) { body(Training(group, offloaded(strategy))); });
      watch_replicas(1);
    }
  }
}

// The step was skipped and nobody cleared, until the next window was half over.
TEST(ClearedGradients, OfAWindowBeforeDoNotComeBackUnderOffload) {
  for (const Clear& clear : all_clears()) {
    with_offload([&](const Training& run) {
      run.backward(0);
      run.microbatch(1, false);
      clear(*run.model);
      run.microbatch(2, true);
      run.expect_sum_of({2});
    });
  }
}

TEST(ClearedGradients, OfAWindowBeforeAddUpWhereNobodyClearsUnderOffload) {
  with_offload([](const Training& run) {
    run.backward(0);
    run.microbatch(1, false);
    run.microbatch(2, false);
    run.microbatch(3, true);
    run.expect_sum_of({0, 1, 2, 3});
  });
}

TEST(ClearedGradients, OfAWindowBeforeOneThatRaisedDoNotComeBackUnderOffload) {
  for (const bool last : {false, true}) {
    with_offload([&](const Training& run) {
      run.backward(0);
      {
        const auto scope = run.model->microbatch(last);
        run.raise(1);
      }
      run.model->zero_grad();
      run.backward(2);
      run.expect_sum_of({2});
    });
  }
}

// No optimizer on the host reads gradients that have not come down: none was taken for one that does.
TEST(ClearedGradients, AnEvaluationInAWindowIsNoUpdateOfTheHosts) {
  with_offload([](const Training& run) {
    for (int window = 0; window < 2; ++window) {
      run.microbatch(2 * window, false);
      {
        const at::NoGradGuard no_grad;
        static_cast<void>(run.net->run(small_batch(kDim, run.group.rank(), 9)));
      }
      run.microbatch(2 * window + 1, true);
      run.expect_sum_of({2 * window, 2 * window + 1});
      run.model->zero_grad();
    }
  });
}

TEST(ClearedGradients, ThatWaitToBeReducedByHandAreDropped) {
  for (const Strategy strategy : runtime::kStrategies) {
    SCOPED_TRACE(runtime::to_string(strategy));
    run_watched_ranks(kRanks, [&](comm::PeerGroup& group) {
      const Training run(group, {.strategy = strategy, .combine = Combine::sum});
      run.model->reduce_by_hand(true);
      run.backward(0);
      run.model->zero_grad();
      run.backward(1);
      run.model->finish_reduces();
      run.expect_sum_of({1});
    });
  }
}

// What is delayed is no gradient yet.
TEST(ClearedGradients, AreNotThoseThatWereDelayed) {
  for (const Strategy strategy : runtime::kStrategies) {
    SCOPED_TRACE(runtime::to_string(strategy));
    run_watched_ranks(kRanks, [&](comm::PeerGroup& group) {
      const Training run(group, {.strategy = strategy, .combine = Combine::sum, .delay_wgrad = true});
      run.backward(0);
      run.model->zero_grad();
      run.backward(1);
      run.model->backward_dw();
      run.expect_sum_of({0, 1});
    });
  }
}

// Its lookups were exchanged by rows, and lost.
TEST(ClearedGradients, OfADelayedBackwardThatRaisedLeaveTheOneBefore) {
  run_watched_ranks(kRanks, [](comm::PeerGroup& group) {
    const auto module = std::make_shared<RowModel>(Layers::fused);
    const auto model = watched_shard(group, module, {{.modules = {module->table}, .use = runtime::Use::rows}},
                                     {.combine = Combine::sum, .row_exchange_bytes = 0, .delay_wgrad = true});
    RowModel oracle(Layers::oracle);
    small_loss(call(*module, row_tokens(group.rank(), 0, 6))).backward();
    const at::Tensor loss = small_loss(call_as(*module, [&] {
      const at::Tensor x = module->table->look_up(row_tokens(group.rank(), 1, 6));
      x.register_hook([](const at::Tensor&) { throw std::runtime_error("half-way"); });
      return module->last->forward(x);
    }));
    expect_in(thrown_text<std::exception>([&] { loss.backward(); }), "half-way");
    model->zero_grad();
    model->backward_dw();
    for (int rank = 0; rank < kRanks; ++rank) small_loss(oracle.forward(row_tokens(rank, 0, 6))).backward();
    expect_gradients(*model, oracle);
  });
}

// The refusal advised what had just been done.
TEST(ClearedGradients, OfAWindowThatWasGivenUpAreComplete) {
  for (const Clear& clear : all_clears()) {
    for (const Strategy strategy : runtime::kStrategies) {
      run_watched_ranks(kRanks, [&](comm::PeerGroup& group) {
        const Training run(group, {.strategy = strategy, .combine = Combine::sum});
        run.microbatch(0, false);
        clear(*run.model);
        EXPECT_NO_THROW(run.model->require_complete_gradients("a step")) << runtime::to_string(strategy);
      });
    }
  }
}

}  // namespace
}  // namespace fsdpp::test::cleared_gradients_test
