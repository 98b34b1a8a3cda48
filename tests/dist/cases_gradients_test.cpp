// Cases of sums over microbatches, ranks and replicas (numbers: the project's list of cases).
#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <array>
#include <cmath>

#include "fsdpp/comm/mesh_group.h"
#include "fsdpp/trace/recorder.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::cases_gradients_test {
namespace {

using device::OperationKind;

constexpr int64_t kDim = 8;
constexpr std::size_t kGroups = 3;  // of Weighed: two units and the root

// Three layers, each on ones: every element of every gradient is what the forward is given.
class Weighed : public torch::nn::Module {
 public:
  Weighed() {
    for (const char* name : {"root_layer", "unit0", "unit1"}) {
      layers_.push_back(
          register_module(name, std::make_shared<SmallLinear>(7, 3, Layers::fused, 7 + layers_.size())));
    }
  }
  [[nodiscard]] at::Tensor forward(double weigh) const {
    const at::Tensor ones = at::ones({1, 7}, layers_[0]->weight.options().requires_grad(false));
    at::Tensor loss = (layers_[0]->forward(ones) * weigh).sum();
    for (const std::size_t unit : {1, 2}) loss = loss + (fsdpp::call(*layers_[unit], ones) * weigh).sum();
    return loss;
  }
  [[nodiscard]] std::vector<std::shared_ptr<torch::nn::Module>> units() const {
    return {layers_[1], layers_[2]};
  }

 private:
  std::vector<std::shared_ptr<SmallLinear>> layers_;
};

struct Made {
  std::shared_ptr<Weighed> module;
  std::shared_ptr<ShardedModel> model;

  void backward(double weigh) const { fsdpp::call(*module, weigh).backward(); }
  // One window.
  void backwards(const std::vector<double>& weights) const {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const auto scope = model->microbatch(i + 1 == weights.size());
      backward(weights[i]);
    }
  }
  void expect_all(double value, const std::string& when) const {
    const std::vector<at::Tensor> gradients = model->full_gradients();
    const auto names = model->parameters();
    for (std::size_t i = 0; i < names.size(); ++i) {
      const auto& [name, sizes] = names[i];
      expect_same(gradients[i], at::full(sizes, value, at::kFloat), text(name, " ", when));
    }
  }
};

template <class GroupOrMesh>
Made make(GroupOrMesh& group, const Options& options, at::ScalarType dtype = at::kFloat) {
  Made made{std::make_shared<Weighed>(), nullptr};
  made.module->to(dtype);
  made.model = watched_shard(group, made.module, made.module->units(), options);
  return made;
}

class CasesOfSums : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Strategies, CasesOfSums, all_ranks(), parameters_name);

// Of each kind of mesh with two replicas of two shards.
template <class Body>
void for_each_hybrid(const Body& body) {
  for (const Strategy strategy : runtime::kStrategies) {
    for (const bool parted : {false, true}) {
      if (parted && !shards_optimizer(strategy)) continue;  // refused
      for (const Combine combine : {Combine::sum, Combine::mean})
        body(Options{.strategy = strategy, .combine = combine, .shard_optimizer_over_replicas = parted});
    }
  }
}

TEST(CasesOfReplicas, Case01ThreeMicrobatchesMeetTheReplicasOnce) {
  for_each_hybrid([](const Options& options) {
    run_watched_ranks(4, [&](comm::PeerGroup& group) {
      comm::MeshGroup mesh(group, comm::hybrid_mesh(4, 2));
      const Made made = make(mesh, options);
      trace::Recorder recorder;
      made.model->device().observe(&recorder);
      for (const bool alike : {true, false}) {
        recorder.clear();
        for (const int gradient : {1, 2, 4}) {
          EXPECT_EQ(recorder.count(OperationKind::signal, "ready replicas' "), 0U) << "before the last one";
          const auto scope = made.model->microbatch(gradient == 4);
          made.backward(gradient * (alike ? 1 : 1 + group.rank()));
        }
        EXPECT_EQ(recorder.count(OperationKind::signal, "ready replicas' "), kGroups) << "each group once";
        const double of_ranks = alike ? 4 : 1 + 2 + 3 + 4;
        made.expect_all(7 * of_ranks / (options.combine == Combine::mean ? 4 : 1), "of three microbatches");
        made.model->zero_grad();
      }
      made.model->device().unobserve(&recorder);
    });
  });
}

// 257 has no bf16, nor has a multiple of it by 2, 3 or 4. What travels in bf16 is one microbatch's gradient.
TEST_P(CasesOfSums, Case02Bf16MicrobatchesAddInFp32OnEveryMeshAndWire) {
  for (const at::ScalarType wire : {at::kFloat, at::kBFloat16}) {
    if (wire == at::kBFloat16 && !reduces_every_backward()) continue;  // it carries a window's sum: refused
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      Options chosen = options();
      chosen.wire_dtype = wire;
      const Made made = make(group, chosen, at::kBFloat16);
      for (const bool set_to_none : {true, false}) {
        made.backwards({256, 1});
        made.expect_all(257 * ranks(), "in a window");
        made.model->zero_grad(set_to_none);
        made.backwards({256});
        made.backwards({1});
        made.expect_all(257 * ranks(), "over two windows");
        made.model->zero_grad(set_to_none);
      }
    });
  }
}

TEST_P(CasesOfSums, Case03LargeAndSmallOfTheRanksSurviveEveryReduce) {
  const double small = std::ldexp(1.0, -9);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (int large = 0; large < ranks(); ++large) {
      run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
        const Made made = make(group, options(), dtype);
        made.backward(group.rank() == large ? 1 : small);
        made.expect_all(1 + (ranks() - 1) * small, text("when rank ", large, " sent 1"));
      });
    }
  }
}

// The fused layers of one window write first and add after: each microbatch's share can be told apart.
TEST_P(CasesOfSums, Case04NoneOfThreeMicrobatchesIsOverwritten) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const Made made = make(group, options());
    trace::Recorder recorder;
    made.model->device().observe(&recorder);
    for (int window = 0; window < 3; ++window) {
      recorder.clear();
      made.backwards({1, 2, 4});
      made.expect_all(7 * ranks(), text("of window ", window));
      EXPECT_EQ(recorder.count(OperationKind::run, "grad "), 0U) << "not through autograd's gradient";
      const std::size_t reduces = recorder.count(OperationKind::signal, "ready ") -
                                  recorder.count(OperationKind::signal, "ready replicas' ");
      EXPECT_EQ(reduces, kGroups * (reduces_every_backward() ? 3 : 1));
      made.model->zero_grad(window == 0);
    }
    made.model->device().unobserve(&recorder);
  });
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {  // the same with layers that depend on each other
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), options());
    SmallNet oracle(3, kDim, Layers::oracle);
    for (int index = 0; index < 3; ++index) {
      const auto scope = model->microbatch(index == 2);
      small_loss(net->run(small_batch(kDim, group.rank(), index))).backward();
      oracle_backward(oracle, all_batches(kDim, ranks(), index));
    }
    expect_gradients(*model, oracle);
  });
}

// Every rank a replica: each shard is a whole.
TEST(CasesOfReplicas, Case05AGroupOfOneRankAddsNeitherCopiesNorRescales) {
  for (const int ranks : {2, 4}) {
    for_each_hybrid([ranks](const Options& options) {
      run_watched_ranks(ranks, [&](comm::PeerGroup& group) {
        comm::MeshGroup mesh(group, comm::hybrid_mesh(ranks, ranks));
        const Made made = make(mesh, options);
        const int share = options.combine == Combine::mean ? 1 : ranks;
        for (int i = 1; i <= 4; ++i) {
          made.backward(3);
          made.expect_all(3 * i * share, text("after backward ", i));
        }
        made.model->zero_grad();
        made.backwards({5, 1});
        made.expect_all(6 * share, "after zero_grad");
      });
    });
  }
}

// The second half's backward alone; its gradients are read before the first half's comes, if it does.
TEST_P(CasesOfSums, Case08GradientsOfAHalfAreReadableAtOnce) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(4, kDim, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), options());
    SmallNet oracle(4, kDim, Layers::oracle);
    const auto first_half = [](SmallNet& of, const at::Tensor& batch) {
      return of.through(*of.blocks[1], of.through(*of.blocks[0], of.first->forward(batch)));
    };
    const auto second_half = [](SmallNet& of, const at::Tensor& cut) {
      return of.last->forward(of.through(*of.blocks[3], of.through(*of.blocks[2], cut)));
    };
    for (int step = 0; step < 3; ++step) {
      const at::Tensor middle =
          call_as(*net, [&] { return first_half(*net, small_batch(kDim, group.rank(), step)); });
      const at::Tensor cut = middle.detach().requires_grad_();
      small_loss(call_as(*net, [&] { return second_half(*net, cut); })).backward();
      EXPECT_TRUE(model->at_rest());
      std::vector<std::pair<at::Tensor, at::Tensor>> halves;  // in the oracle: output and its gradient
      for (const at::Tensor& batch : all_batches(kDim, ranks(), step)) {
        const at::Tensor output = first_half(oracle, batch);
        const at::Tensor its_cut = output.detach().requires_grad_();
        small_loss(second_half(oracle, its_cut)).backward();
        halves.emplace_back(output, its_cut.grad());
      }
      expect_gradients(*model, oracle);
      if (step == 1) {  // the rest never comes
        model->zero_grad();
        clear(oracle);
        continue;
      }
      middle.backward(cut.grad());
      EXPECT_TRUE(model->at_rest());
      for (const auto& [output, gradient] : halves) output.backward(gradient);
      expect_gradients(*model, oracle);
    }
  });
}

// One rank has no tokens; how many there are in all is known when the step comes.
TEST_P(CasesOfSums, Case11RanksWithDifferentNumbersOfTokens) {
  const std::array<std::array<int64_t, 4>, 4> tokens_of = {{{16}, {3, 13}, {0, 5, 11}, {6, 1, 0, 9}}};
  const auto& tokens = tokens_of.at(static_cast<std::size_t>(ranks() - 1));
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), options());
    const auto fixed = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    Options divided = options();
    divided.divisor = 16;  // known beforehand
    const auto other = watched_shard(group, fixed, fixed->units(), divided);
    SmallNet oracle(2, kDim, Layers::oracle);
    for (const int64_t times : {1, 2}) {
      const auto batch_of = [&](int rank) {
        return small_batch(kDim, rank, 0, times * tokens.at(static_cast<std::size_t>(rank)));
      };
      const at::Tensor own = batch_of(group.rank());
      const double all = group.sum(std::array{static_cast<double>(own.size(0))})[0];
      EXPECT_EQ(all, 16.0 * static_cast<double>(times));
      (small_loss(net->run(own)) / all).backward();
      (small_loss(fixed->run(own)) / static_cast<double>(times)).backward();
      for (int rank = 0; rank < ranks(); ++rank) (small_loss(oracle.run(batch_of(rank))) / all).backward();
      expect_gradients(*model, oracle);
      expect_gradients(*other, oracle);
      model->zero_grad();
      other->zero_grad();
      clear(oracle);
    }
  });
}

// The sum that a mean is made of never stands where a mean was asked for.
TEST_P(CasesOfSums, Case13AMeanIsAMean) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    Options mean = options();
    mean.combine = Combine::mean;
    const Made made = make(group, mean);
    for (int window = 0; window < 2; ++window) {
      made.backwards({2.0 * group.rank(), 8});
      const double expected = ranks() - 1 + 8;
      if (ranks() == 3) {  // a third is none of binary's numbers
        for (const at::Tensor& gradient : made.model->full_gradients())
          EXPECT_TRUE(at::allclose(gradient, at::full(gradient.sizes(), expected), 1e-6, 0)) << gradient;
      } else {
        made.expect_all(expected, "the mean over all ranks");
      }
      made.model->zero_grad();
    }
  });
}

}  // namespace
}  // namespace fsdpp::test::cases_gradients_test
