// How often each strategy talks: exact counts of collectives per optimizer step, by the recorded schedule.
#include <gtest/gtest.h>

#include <iostream>
#include <mutex>
#include <set>
#include <vector>

#include "fsdpp/comm/c10d_collectives.h"
#include "fsdpp/comm/mesh_group.h"
#include "fsdpp/trace/recorder.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"
#include "tests/support/thread_c10d.h"

namespace fsdpp::test::collectives_test {
namespace {

using device::OperationKind;

constexpr int kBlocks = 3;
constexpr int kGroups = kBlocks + 1;  // and the root's

// Per rank and step.
struct Counts {
  int64_t gathers = 0;          // of a unit's weights over the shard axis
  int64_t reduces = 0;          // of a group's gradients over the shard axis
  int64_t replica_sums = 0;     // of a group's gradient shards over the replicas
  int64_t replica_gathers = 0;  // of a group's published shard over the replicas
  friend bool operator==(const Counts&, const Counts&) = default;
};

struct Case {
  Strategy strategy;
  int replicas;
  bool parted;
};

Counts expected(const Case& c, int64_t microbatches) {
  Counts counts;
  const bool reduces_all = shards_gradients(c.strategy);
  counts.reduces = kGroups * (reduces_all ? microbatches : 1);
  if (shards_parameters(c.strategy)) {
    // In forward and in backward, but for the root and the last block, which stay in between.
    counts.gathers = microbatches * (2 * kGroups - 2);
  } else if (shards_optimizer(c.strategy)) {
    counts.gathers = kGroups;
  }
  if (c.replicas > 1) counts.replica_sums = kGroups;
  if (c.parted) counts.replica_gathers = kGroups;
  return counts;
}

Counts counted(const trace::Recorder& recorder) {
  const auto signals = [&](const char* name) {
    return static_cast<int64_t>(recorder.count(OperationKind::signal, name));
  };
  Counts counts;
  counts.replica_sums = signals("ready replicas' ");
  counts.reduces = signals("ready ") - counts.replica_sums;
  counts.replica_gathers = signals("published replicas' ");
  return counts;
}

std::string line(const Case& c, int64_t microbatches, const Counts& counts) {
  return text("collectives: ", runtime::to_string(c.strategy), c.replicas > 1 ? " on a hybrid mesh" : "",
              c.parted ? ", optimizer over replicas" : "", ", ", microbatches,
              " microbatches: ", counts.gathers, " gathers, ", counts.reduces, " reduces, ",
              counts.replica_sums, " sums over replicas, ", counts.replica_gathers,
              " gathers over replicas\n");
}

TEST(Collectives, EachStrategyTalksAsOftenAsItsTableSays) {
  std::vector<Case> cases;
  for (const Strategy strategy : runtime::kStrategies) {
    cases.push_back({strategy, 1, false});
    cases.push_back({strategy, 2, false});
    if (shards_optimizer(strategy)) cases.push_back({strategy, 2, true});
  }
  for (const Case& c : cases) {
    for (const int64_t microbatches : {1, 3}) {
      std::mutex mutex;
      run_watched_ranks(4, [&](comm::PeerGroup& group) {
        comm::MeshGroup mesh(group, comm::hybrid_mesh(4, c.replicas));
        const auto net = std::make_shared<SmallNet>(kBlocks, 8, Layers::fused);
        const auto model = watched_shard(mesh, net, net->units(),
                                         {.strategy = c.strategy, .shard_optimizer_over_replicas = c.parted});
        const auto step = [&](int64_t count) {
          for (int64_t i = 0; i < count; ++i) {
            const auto scope = model->microbatch(i + 1 == count);
            small_loss(net->run(small_batch(8, group.rank(), static_cast<int>(i)))).backward();
          }
          integer_step(model->shards());
          model->zero_grad();
        };
        step(microbatches);  // the first one is planned from the structure alone
        step(microbatches);
        trace::Recorder recorder;
        model->device().observe(&recorder);
        const int64_t before = model->counters().gathers;
        step(microbatches);
        Counts counts = counted(recorder);
        counts.gathers = model->counters().gathers - before;
        model->device().unobserve(&recorder);
        EXPECT_EQ(counts, expected(c, microbatches)) << line(c, microbatches, counts);
        const std::lock_guard lock(mutex);
        if (group.rank() == 0) std::cout << line(c, microbatches, counts);
      });
    }
  }
}

// The optimizer's order is nobody's business: new weights are gathered once, in one order on all ranks.
TEST(Collectives, AnEvaluationAfterTheStepGathersOnceForAllThatFollow) {
  for (const Strategy strategy : {Strategy::optim, Strategy::optim_grads}) {
    run_watched_ranks(2, [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(kBlocks, 8, Layers::fused);
      const auto model = watched_shard(group, net, net->units(), {.strategy = strategy});
      model->promise_to_tell();
      SmallNet oracle(kBlocks, 8, Layers::oracle);
      const auto evaluate = [&] {
        const at::NoGradGuard no_grad;
        expect_same(net->run(small_batch(8, 0)), oracle.run(small_batch(8, 0)).detach(), "evaluation");
      };
      small_loss(net->run(small_batch(8, 0))).backward();
      oracle_backward(oracle, {small_batch(8, 0)});
      const int64_t before = model->counters().gathers;
      evaluate();
      EXPECT_EQ(model->counters().gathers, before) << "nothing new was published";
      std::vector<at::Tensor> shards = model->shards();
      if (group.rank() == 1) std::reverse(shards.begin(), shards.end());
      integer_step(shards);
      integer_step(oracle.parameters());
      model->weights_changed();
      model->zero_grad();
      evaluate();
      evaluate();
      small_loss(net->run(small_batch(8, 0))).backward();
      EXPECT_EQ(model->counters().gathers, before + kGroups) << "once for each unit";
    });
  }
}

// A library's collectives read every rank's slot, whatever the ranks could tell each other.
TEST(Collectives, AUnitThatNobodyUsedAddsZerosThroughC10d) {
  for (const Strategy strategy : runtime::kStrategies) {
    run_watched_ranks(2, [&](comm::PeerGroup& group) {
      comm::use_c10d(group, ThreadC10d::over(group));
      const auto net = std::make_shared<SmallNet>(kBlocks, 8, Layers::fused);
      const auto model =
          watched_shard(group, net, net->units(), {.strategy = strategy, .combine = Combine::sum});
      SmallNet oracle(kBlocks, 8, Layers::oracle);
      for (const bool skips : {false, true, true, false}) {
        net->skipped = oracle.skipped = skips ? std::set<int>{1} : std::set<int>{};
        small_loss(net->run(small_batch(8, group.rank()))).backward();
        oracle_backward(oracle, all_batches(8, group.ranks()));
        expect_gradients(*model, oracle);
        integer_step(model->shards());
        integer_step(oracle.parameters());
        model->zero_grad();
        clear(oracle);
      }
    });
  }
}

}  // namespace
}  // namespace fsdpp::test::collectives_test
