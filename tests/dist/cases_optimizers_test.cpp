// Cases of clipping and optimizers that broke other runtimes (numbers: the project's list of cases).
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/clip.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::cases_optimizers_test {
namespace {

constexpr int64_t kDim = 8;

class CasesOfOptimizers : public OnRanks {
 public:
  static std::shared_ptr<ShardedModel> shard(comm::PeerGroup& group, const std::shared_ptr<SmallNet>& net) {
    return watched_shard(group, net, net->units(), options());
  }
};
INSTANTIATE_TEST_SUITE_P(Strategies, CasesOfOptimizers, all_ranks(), parameters_name);

void backward(SmallNet& net, int rank, int index = 0) {
  small_loss(net.run(small_batch(kDim, rank, index))).backward();
}

TEST_P(CasesOfOptimizers, Case34TheGlobalNormIsTheSameOnEveryRankAndClipsWhatTheOptimizerReads) {
  for (const double type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    std::mutex mutex;
    std::vector<double> norms;
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
      const auto model = shard(group, net);
      SmallNet oracle(3, kDim, Layers::oracle);
      backward(*net, group.rank());
      oracle_backward(oracle, all_batches(kDim, ranks()));
      std::vector<at::Tensor> parts;
      for (const at::Tensor& weight : oracle.parameters())
        parts.push_back(weight.grad().reshape({-1}).to(at::kDouble));
      const double expected = at::linalg_vector_norm(at::cat(parts), type).item<double>();
      EXPECT_EQ(optim::clip_grad_norm(*model, 2 * expected, type),
                optim::clip_grad_norm(*model, 3 * expected, type))
          << "below the limit nothing changes";
      expect_gradients(*model, oracle);
      const double norm = optim::clip_grad_norm(*model, expected / 4, type);
      EXPECT_NEAR(norm, expected, 1e-6 * expected);
      const std::vector<at::Tensor> gradients = model->full_gradients();
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        EXPECT_TRUE(at::allclose(gradients[i],
                                 oracle.named_parameters()[model->parameters()[i].first].grad() / 4, 1e-5));
      }
      const std::lock_guard lock(mutex);
      norms.push_back(norm);
    });
    for (const double norm : norms) EXPECT_EQ(std::memcmp(&norm, &norms[0], sizeof(norm)), 0);
  }
}

TEST_P(CasesOfOptimizers, Case34AGradientThatIsNotFiniteOnOneRankIsSoForAll) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const double type : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
      run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
        const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
        const auto model = shard(group, net);
        backward(*net, group.rank());
        if (model->owners().rank() == 0) {  // in one shard alone, after the reduce
          for (const at::Tensor& shard : model->shards()) {
            if (shard.grad().numel() == 0) continue;
            shard.grad().view({-1})[0].fill_(bad);
            break;
          }
        }
        if (!sharded()) return;  // replicas differ: not a state that the runtime makes
        const double norm = optim::clip_grad_norm(*model, 1.0, type);
        EXPECT_EQ(std::isnan(norm), std::isnan(bad)) << norm;
        EXPECT_FALSE(std::isfinite(norm)) << norm;
      });
      run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
        const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
        const auto model = shard(group, net);
        const float factor = group.rank() == ranks() - 1 ? bad : 1.0F;  // in one rank's loss
        (small_loss(net->run(small_batch(kDim, group.rank()))) * factor).backward();
        EXPECT_FALSE(std::isfinite(optim::clip_grad_norm(*model, 1.0, type)));
      });
    }
  }
}

TEST_P(CasesOfOptimizers, Case35AdamWEqualsTorchsOverTenSteps) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(3, kDim, Layers::fused);
    const auto model = shard(group, net);
    optim::AdamW ours(*model, {.weight_decay = 0.1});
    EXPECT_EQ(ours.state_bytes(), 0);
    SmallNet oracle(3, kDim, Layers::oracle);
    torch::optim::AdamW plain(oracle.parameters(), torch::optim::AdamWOptions(1e-3).weight_decay(0.1));
    for (int step = 0; step < 10; ++step) {
      backward(*net, group.rank(), step);
      oracle_backward(oracle, all_batches(kDim, ranks(), step));
      ours.step(1e-3);
      plain.step();
      const std::vector<at::Tensor> weights = model->full_weights();
      for (std::size_t i = 0; i < weights.size(); ++i) {
        const std::string name = model->parameters()[i].first;
        EXPECT_TRUE(at::allclose(weights[i], oracle.named_parameters()[name].detach(), 1e-6, 1e-6))
            << name << " after step " << step + 1;
      }
      model->zero_grad();
      clear(oracle);
    }
  });
}

}  // namespace
}  // namespace fsdpp::test::cases_optimizers_test
