// Cases of gradients and order that broke other runtimes (numbers: the project's list of cases).
#include <map>
#include <mutex>

#include "fsdpp/trace/recorder.h"
#include "tests/support/gate_device.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::cases_test {
namespace {

using device::Operation;
using device::OperationKind;

constexpr int64_t kDim = 8;

class Cases : public OnRanks {
 public:
  static std::shared_ptr<ShardedModel> shard(comm::PeerGroup& group, const std::shared_ptr<SmallNet>& net) {
    return watched_shard(group, net, net->units(), options());
  }
};
INSTANTIATE_TEST_SUITE_P(Strategies, Cases, all_ranks(), parameters_name);

void backward(SmallNet& net, int rank, int index = 0) {
  small_loss(net.run(small_batch(kDim, rank, index))).backward();
}

std::vector<std::string> signals(const trace::Recorder& recorder, const std::string& prefix) {
  return recorder.names([&](const Operation& operation) {
    return operation.kind == OperationKind::signal && operation.name.starts_with(prefix);
  });
}

// What the ranks of one run recorded, for comparing them afterwards.
class Notes {
 public:
  void write(int rank, std::vector<std::string> lines) {
    const std::lock_guard lock(mutex_);
    notes_[rank] = std::move(lines);
  }
  void expect_equal(std::size_t at_least) const {
    for (const auto& [rank, lines] : notes_) {
      EXPECT_GE(lines.size(), at_least);
      EXPECT_EQ(lines, notes_.begin()->second) << "rank " << rank;
    }
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<std::string>> notes_;
};

TEST_P(Cases, Case06RanksUseDifferentParametersOfOneUnit) {
  Notes notes;
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = shard(group, net);
    SmallNet oracle(3, kDim, Layers::oracle);
    trace::Recorder recorder;
    model->device().observe(&recorder);
    for (int step = 0; step < 3; ++step) {
      for (int rank = 0; rank < ranks(); ++rank) {
        const auto choose = [&](SmallNet& of) {
          for (int i = 0; i < 3; ++i)
            of.blocks[static_cast<std::size_t>(i)]->skip_down = (rank + i + step) % 3 == 1;
        };
        choose(oracle);
        oracle_backward(oracle, {small_batch(kDim, rank, step)});
        if (rank != group.rank()) continue;
        choose(*net);
        backward(*net, rank, step);
      }
      expect_gradients(*model, oracle);
    }
    notes.write(group.rank(), signals(recorder, "ready "));
    model->device().unobserve(&recorder);
  });
  notes.expect_equal(3 * 4);
}

TEST_P(Cases, Case07BackwardTwiceThroughARetainedGraphIsTwiceTheGradient) {
  for (const Layers layers : {Layers::fused, Layers::unfused}) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(3, kDim, layers);
      const auto model = shard(group, net);
      SmallNet oracle(3, kDim, Layers::oracle);
      const at::Tensor loss = small_loss(net->run(small_batch(kDim, group.rank())));
      for (int time = 0; time < 2; ++time) {
        loss.backward({}, /*retain_graph=*/true);
        oracle_backward(oracle, all_batches(kDim, ranks()));
        expect_gradients(*model, oracle);
        EXPECT_TRUE(model->at_rest());
      }
    });
  }
}

// A schedule of the user's own: the second half's backward, then the first half's with the gradient it gave.
TEST_P(Cases, Case08BackwardThroughHalfOfTheModel) {
  Notes notes;
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(4, kDim, Layers::fused);
    const auto model = shard(group, net);
    SmallNet oracle(4, kDim, Layers::oracle);
    trace::Recorder recorder;
    model->device().observe(&recorder);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor middle = call_as(*net, [&] {
        at::Tensor x = net->first->forward(small_batch(kDim, group.rank(), step));
        return net->through(*net->blocks[1], net->through(*net->blocks[0], x));
      });
      const at::Tensor cut = middle.detach().requires_grad_();
      const at::Tensor output = call_as(*net, [&] {
        return net->last->forward(net->through(*net->blocks[3], net->through(*net->blocks[2], cut)));
      });
      oracle_backward(oracle, all_batches(kDim, ranks(), step));
      small_loss(output).backward();
      EXPECT_TRUE(model->at_rest());
      middle.backward(cut.grad());
      EXPECT_TRUE(model->at_rest());
      expect_gradients(*model, oracle);
    }
    notes.write(group.rank(), signals(recorder, "ready "));
    model->device().unobserve(&recorder);
  });
  notes.expect_equal(4 * 5);
}

TEST_P(Cases, Case14AUnitOfFusedWeightsAloneIsReducedOncePerSynchronisation) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused, 7, /*biased=*/false);
    const auto model = shard(group, net);
    trace::Recorder recorder;
    model->device().observe(&recorder);
    for (int index = 0; index < 3; ++index) {
      const auto scope = model->microbatch(index == 2);
      backward(*net, group.rank(), index);
      EXPECT_EQ(recorder.count(OperationKind::run, "grad "), 0U)
          << "nothing went through autograd's gradient";
    }
    const std::size_t expected = reduces_every_backward() ? 3 : 1;
    for (const char* unit : {"ready root", "ready block0", "ready block1"}) {
      EXPECT_EQ(recorder.count(OperationKind::signal, unit), expected) << unit;
    }
    model->device().unobserve(&recorder);
    SmallNet oracle(2, kDim, Layers::oracle, 7, /*biased=*/false);
    for (int index = 0; index < 3; ++index) oracle_backward(oracle, all_batches(kDim, ranks(), index));
    expect_gradients(*model, oracle);
    for (const at::Tensor& parameter : net->parameters())
      EXPECT_TRUE(parameter.grad().defined());  // the guard alone
  });
}

// Ties the weights of `net` in one of several ways; in the oracle all layers are plain.
void tie(SmallNet& net, int way, Layers one, Layers other) {
  const auto again = [](SmallBlock& block, const SmallLinear& weights, Layers layers) {
    block.down = std::dynamic_pointer_cast<SmallLinear>(
        block.replace_module("down", std::make_shared<SmallLinear>(weights, layers)));
  };
  if (way == 0) again(*net.blocks[0], *net.blocks[0]->up, other);  // within one unit
  if (way == 1) again(*net.blocks[1], *net.blocks[0]->up, other);  // across units
  if (way == 2) again(*net.blocks[0], *net.last, other);           // a unit and the root
  if (way == 3) {                                                  // three times, in three units
    again(*net.blocks[0], *net.last, other);
    again(*net.blocks[1], *net.last, one);
    again(*net.blocks[2], *net.first, other);
  }
}

TEST_P(Cases, Case15OneWeightInTwoLayers) {
  for (int way = 0; way < 4; ++way) {
    for (const auto& [one, other] : {std::pair(Layers::fused, Layers::fused),
                                     {Layers::fused, Layers::unfused},
                                     {Layers::unfused, Layers::fused}}) {
      SCOPED_TRACE(text("tied in way ", way));
      run_watched_ranks(ranks(), [&, one = one, other = other](comm::PeerGroup& group) {
        const auto net = std::make_shared<SmallNet>(3, kDim, one);
        tie(*net, way, one, other);
        const auto model = shard(group, net);
        SmallNet oracle(3, kDim, Layers::oracle);
        tie(oracle, way, Layers::oracle, Layers::oracle);
        trace::Recorder recorder;
        model->device().observe(&recorder);
        for (const int uses : {1, 2}) {
          net->uses = oracle.uses = uses;
          recorder.clear();
          backward(*net, group.rank(), uses);
          oracle_backward(oracle, all_batches(kDim, ranks(), uses));
          expect_gradients(*model, oracle);
          for (const auto& unit : model->units()) {
            const std::size_t expected = unit.parameters > 0 ? 1 : 0;
            EXPECT_EQ(recorder.count(OperationKind::signal, "ready " + unit.name), expected) << unit.name;
          }
        }
        model->device().unobserve(&recorder);
        integer_step(model->shards());
        integer_step(oracle.parameters());
        expect_weights(*model, oracle);
        EXPECT_TRUE(model->at_rest());
      });
    }
  }
}

TEST_P(Cases, Case16AFusedLayerThatDidNotRunHasZeroGradient) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto model = shard(group, net);
    backward(*net, group.rank());
    model->zero_grad();
    net->skipped = {1};
    net->blocks[0]->skip_down = true;
    backward(*net, group.rank());
    const std::vector<at::Tensor> gradients = model->full_gradients();
    const auto names = model->parameters();
    for (std::size_t i = 0; i < names.size(); ++i) {
      ASSERT_TRUE(gradients[i].defined()) << names[i].first;
      const bool ran = !names[i].first.starts_with("block1") && !names[i].first.starts_with("block0.down");
      EXPECT_EQ(at::equal(gradients[i], at::zeros_like(gradients[i])), !ran) << names[i].first;
    }
  });
}

// At the time of the reduce, the values that a layer's backward promised stand at the address it was given.
TEST_P(Cases, Case20TheAddressALayerWritesLiesInTheReducesInput) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    auto lanes = std::make_unique<GateDevice>();
    std::map<std::string, ByteRange> slots;
    std::map<std::string, std::pair<std::string, ByteRange>> written;  // parameter: unit's slot, bytes
    SmallNet oracle(2, kDim, Layers::oracle);
    oracle_backward(oracle, {small_batch(kDim, group.rank())});
    const auto own = oracle.named_parameters();
    std::size_t checked = 0;
    std::string reduced;
    lanes->before = [&](const Operation& operation) {
      if (operation.kind == OperationKind::acquire && operation.name.starts_with("slot ")) {
        slots[operation.name.substr(5)] = operation.writes[0];
      }
      if (operation.kind == OperationKind::run && operation.name.starts_with("wgrad ")) {
        written[operation.name.substr(6)] = {"", operation.writes[0]};
      }
      if (operation.kind != OperationKind::signal || !operation.name.starts_with("ready ")) return;
      if (operation.name.starts_with("ready replicas' ")) return;  // what is summed there was reduced before
      const ByteRange slot = slots.at(operation.name.substr(6));
      for (auto& [name, place] : written) {
        const auto* first = static_cast<const std::byte*>(place.second.begin);
        const auto* slot_first = static_cast<const std::byte*>(slot.begin);
        if (first < slot_first || first + place.second.size > slot_first + slot.size || !place.first.empty())
          continue;
        place.first = operation.name;
        const at::Tensor expected = own[name].grad().contiguous();
        ASSERT_EQ(place.second.size, static_cast<std::size_t>(expected.nbytes())) << name;
        EXPECT_EQ(std::memcmp(first, expected.data_ptr(), place.second.size), 0) << name;
        ++checked;
      }
    };
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    Options all_in_slots = options();
    all_in_slots.late_group_elements = -1;
    const auto model = watched_shard(group, net, net->units(), all_in_slots, std::move(lanes));
    backward(*net, group.rank());
    EXPECT_EQ(checked, own.size()) << "each weight and bias was written into its unit's reduce input";
  });
}

TEST_P(Cases, Case41EveryRankIssuesTheSameCollectivesInTheSameOrder) {
  Notes notes;
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(5, kDim, Layers::fused);
    const auto model = shard(group, net);
    trace::Recorder recorder;
    model->device().observe(&recorder);
    for (int step = 0; step < 4; ++step) {
      net->skipped = step == 3 ? std::set<int>{group.rank()} : std::set<int>{};
      for (int index = 0; index < 2; ++index) {
        const auto scope = model->microbatch(index == 1);
        backward(*net, group.rank(), index);
      }
      model->zero_grad();
    }
    notes.write(group.rank(), recorder.names([](const Operation& operation) {
      return operation.kind == OperationKind::signal;  // gathers are one-sided: on demand they may differ
    }));
    model->device().unobserve(&recorder);
  });
  notes.expect_equal(4 * 6);
}

TEST_P(Cases, Case42DataDependentBranchesBetweenSteps) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(5, kDim, Layers::fused);
    Options in_rank_order = options();  // numbers grow beyond what is exact in any order, from some step on
    in_rank_order.late_group_elements = -1;
    const auto model = watched_shard(group, net, net->units(), in_rank_order);
    SmallNet oracle(5, kDim, Layers::oracle);
    const std::vector<std::set<int>> branches = {{}, {1, 2}, {}, {0, 4}, {3}, {0, 1, 2, 3, 4}, {}};
    int64_t departures = 0;
    for (std::size_t step = 0; step < branches.size(); ++step) {
      net->skipped = oracle.skipped = branches[step];
      net->reversed = oracle.reversed = step % 3 == 2;
      backward(*net, group.rank(), static_cast<int>(step));
      oracle_backward(oracle, all_batches(kDim, ranks(), static_cast<int>(step)));
      EXPECT_TRUE(model->at_rest());
      if (!hybrid() || step < 3) {
        expect_gradients(*model, oracle);
        integer_step(model->shards());
        integer_step(oracle.parameters());
        expect_weights(*model, oracle);
      }
      model->zero_grad();
      clear(oracle);
      const bool arrived_elsewhere = step != 0 && step != 5;  // in step 5 nothing comes that was not expected
      EXPECT_EQ(model->counters().departures > departures, arrived_elsewhere) << "step " << step;
      departures = model->counters().departures;
    }
  });
}

}  // namespace
}  // namespace fsdpp::test::cases_test
