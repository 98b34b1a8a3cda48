// Cases of memory (numbers: the project's list of cases): exact figures of the runtime's ledger, and
// addresses.
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <iostream>
#include <map>
#include <mutex>

#include "fsdpp/optim/adamw.h"
#include "fsdpp/trace/recorder.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::memory_test {
namespace {

using device::OperationKind;

int64_t bytes_of(const ShardedModel& model, const std::string& purpose) {
  const auto& purposes = model.memory().by_purpose();
  const auto found = purposes.find(purpose);
  return found == purposes.end() ? 0 : found->second;
}

void train(SmallNet& net, ShardedModel& model, optim::AdamW& optimizer, int rank, int steps,
           at::ScalarType dtype) {
  for (int step = 0; step < steps; ++step) {
    small_loss(net.run(small_batch(net.dim, rank, step).to(dtype)).to(at::kFloat)).backward();
    optimizer.step(1e-3);
    model.zero_grad();
  }
}

struct Figures {
  int64_t peak;  // of the runtime's memory on one rank, AdamW's state included
  int64_t rest;  // main, published and model weights, gradients that outlive a backward, AdamW's state
};

// Five steps of a model of `layers` equal units with bf16 weights.
Figures measure(int ranks, Strategy strategy, int layers, int64_t dim = 64) {
  Figures figures{};
  std::mutex mutex;
  run_watched_ranks(ranks, [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(layers, dim, Layers::fused);
    net->to(at::kBFloat16);
    const auto model = watched_shard(group, net, net->units(), Options{.strategy = strategy});
    optim::AdamW optimizer(*model, {});
    train(*net, *model, optimizer, group.rank(), 5, at::kBFloat16);
    const int64_t state = optimizer.state_bytes();
    const std::lock_guard lock(mutex);
    figures.peak = std::max(figures.peak, model->memory().peak() + state);
    int64_t rest = state;
    for (const char* purpose : {"main weights", "published weights", "model weights", "gradient shards",
                                "full weights that stay"}) {
      rest += bytes_of(*model, purpose);
    }
    if (!shards_gradients(strategy)) rest += bytes_of(*model, "gradient slots");  // the gradients themselves
    figures.rest = std::max(figures.rest, rest);
    EXPECT_EQ(bytes_of(*model, "full weights beside the plan"), 0);
    EXPECT_EQ(bytes_of(*model, "gradients beside the plan"), 0);
  });
  return figures;
}

TEST(CasesOfMemory, Case45WhatShardingNeedsBesideTheShardsDoesNotGrowWithDepth) {
  for (const int ranks : {2, 4}) {
    const Figures at_8 = measure(ranks, Strategy::optim_grads_params, 8);
    EXPECT_GT(at_8.peak, at_8.rest);
    for (const int layers : {16, 32}) {
      const Figures deeper = measure(ranks, Strategy::optim_grads_params, layers);
      EXPECT_GT(deeper.rest, at_8.rest * layers / 8 * 8 / 10) << "the rest grows with the layers";
      EXPECT_EQ(deeper.peak - deeper.rest, at_8.peak - at_8.rest)
          << layers << " layers on " << ranks << " ranks";
    }
    for (const int layers : {8, 16}) {
      int64_t least = 0;
      for (auto strategy = runtime::kStrategies.rbegin(); strategy != runtime::kStrategies.rend();
           ++strategy) {
        const int64_t peak = measure(ranks, *strategy, layers).peak;
        EXPECT_LE(least, peak) << to_string(*strategy) << ", " << layers << " layers on " << ranks
                               << " ranks";
        least = peak;
      }
    }
  }
}

// Bytes per parameter on one of N ranks: fp32 main weights and two moments, bf16 weights (published shard, or
// whole), fp32 gradients (shard, or whole).
TEST(CasesOfMemory, Case45TheRestIsWhatTheFormulaSays) {
  constexpr int kRanks = 4;
  constexpr int kLayers = 8;
  constexpr int64_t kWide = 512;
  constexpr double kMiB = 1 << 20;
  const double parameters = (2 * kLayers + 2) * (kWide * kWide + kWide);
  for (const Strategy strategy : runtime::kStrategies) {
    const double states = 12.0 / (shards_optimizer(strategy) ? kRanks : 1);
    const double weights = 2.0 / (shards_parameters(strategy) ? kRanks : 1);
    const double gradients = 4.0 / (shards_gradients(strategy) ? kRanks : 1);
    const double expected = parameters * (states + weights + gradients);
    const auto rest = static_cast<double>(measure(kRanks, strategy, kLayers, kWide).rest);
    EXPECT_NEAR(rest, expected, kMiB) << to_string(strategy);
    std::cout << "memory: " << to_string(strategy) << " on " << kRanks << " ranks: rest " << rest / kMiB
              << " MiB, by the formula " << expected / kMiB << " MiB\n";
  }
}

class CasesOfAddresses : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Strategies, CasesOfAddresses, all_ranks(), parameters_name);

// Also while somebody keeps a gradient of an earlier step, and in a window that begins with gradients left
// over.
TEST_P(CasesOfAddresses, GradientsStayWhereTheyAreWhenAskedTo) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(3, 16, Layers::fused);
    Options kept = options();
    kept.keep_gradient_addresses = true;
    const auto model = watched_shard(group, net, net->units(), kept);
    std::vector<at::Tensor> first;
    for (int step = 0; step < 5; ++step) {
      for (int index = 0; index < 2; ++index) {
        const auto scope = model->microbatch(index == 1);
        small_loss(net->run(small_batch(16, group.rank(), index))).backward();
      }
      for (const at::Tensor& shard : model->shards()) {
        if (shard.numel() == 0) continue;
        if (step == 0) first.push_back(shard.grad());
      }
      std::size_t next = 0;
      for (const at::Tensor& shard : model->shards()) {
        if (shard.numel() == 0) continue;
        EXPECT_EQ(shard.grad().const_data_ptr(), first.at(next++).const_data_ptr()) << step;
      }
      if (step != 2) model->zero_grad(step % 2 == 0);
    }
  });
}

class CasesOfFrozen : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Strategies, CasesOfFrozen, all_ranks(), parameters_name);

TEST_P(CasesOfFrozen, Case38NoGradientMemoryForFrozenWeights) {
  const auto train_with = [&](bool frozen) {
    std::pair<int64_t, int64_t> gradients_and_peak;
    std::mutex mutex;
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(6, 64, Layers::fused);
      int64_t trained = 0;
      for (const auto& item : net->named_parameters()) {
        if (frozen && item.key().ends_with("weight")) item.value().requires_grad_(false);
        if (item.value().requires_grad()) trained += item.value().numel();
      }
      const auto model = watched_shard(group, net, net->units(), options());
      optim::AdamW optimizer(*model, {});
      train(*net, *model, optimizer, group.rank(), 3, at::kFloat);
      const int64_t gradients = bytes_of(*model, "gradient slots") + bytes_of(*model, "gradient shards");
      const std::lock_guard lock(mutex);
      // Two copies at most (slot and shard), each of at most 256 bytes' padding per bias and rank.
      EXPECT_TRUE(!frozen || gradients <= 2 * (trained * 4 + 14 * 256 * (ranks() + 1))) << gradients;
      gradients_and_peak = {gradients, model->memory().peak() + optimizer.state_bytes()};
    });
    return gradients_and_peak;
  };
  const auto full = train_with(false);
  const auto frozen = train_with(true);
  EXPECT_LT(frozen.first, full.first / 3);
  EXPECT_LT(frozen.second, full.second * 3 / 4) << "weights stay; gradients and optimizer state go";
}

// A base in bf16 with trained biases: no fp32 copy of what never changes, and the bits that were given.
void train_frozen_base(ShardedModel& model, SmallNet& net, int rank) {
  std::map<std::string, at::Tensor> given;
  for (const auto& item : SmallNet(4, 64, Layers::oracle).named_parameters())
    given[item.key()] = item.value().to(at::kBFloat16);
  int64_t elements = 0;
  for (std::size_t i = 0; i < model.shards().size(); ++i) {
    const bool frozen = model.parameters()[i].first.ends_with("weight");
    EXPECT_EQ(model.shards()[i].scalar_type(), frozen ? at::kBFloat16 : at::kFloat);
    elements += model.shards()[i].numel();
  }
  EXPECT_LT(bytes_of(model, "main weights") + bytes_of(model, "main weights in host memory"), 3 * elements)
      << "2 bytes each, few of 4, and padding";
  EXPECT_TRUE(model.all_fp32()) << "of what is trained: AdamW's kernel takes it";
  optim::AdamW optimizer(model, {});
  train(net, model, optimizer, rank, 3, at::kBFloat16);
  const std::vector<at::Tensor> weights = model.full_weights();
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const std::string name = model.parameters()[i].first;
    EXPECT_EQ(weights[i].equal(given.at(name)), name.ends_with("weight")) << name;
  }
}

TEST_P(CasesOfFrozen, Case38FrozenWeightsAreKeptAsTheyWereGiven) {
  for (const bool offload : {false, true}) {
    if (offload && !sharded()) continue;  // refused
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(4, 64, Layers::fused);
      net->to(at::kBFloat16);
      for (const auto& item : net->named_parameters())
        item.value().requires_grad_(!item.key().ends_with("weight"));
      Options chosen = options();
      chosen.offload = offload;
      const auto model = watched_shard(group, net, net->units(), chosen);
      train_frozen_base(*model, *net, group.rank());
    });
  }
}

// Whether an address still is the memory that it was. That something is mapped there says nothing: malloc and
// sanitizers map memory of their own at any time, also where ours has just been, but never with our mark.
// System calls copy the mark: they answer EFAULT where there is no memory, and no sanitizer looks at them.
class Marks {
 public:
  Marks() { EXPECT_EQ(pipe(ends_.data()), 0); }
  ~Marks() {
    for (const int end : ends_) close(end);
  }
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;

  /// Whether the mark could be written at `address`.
  [[nodiscard]] bool write(const void* address) const {
    return copy_from(&kMark) && copy_to(const_cast<void*>(address)) && is_at(address);
  }
  [[nodiscard]] bool is_at(const void* address) const {
    uint64_t found = 0;
    return copy_from(address) && copy_to(&found) && found == kMark;
  }

 private:
  static constexpr uint64_t kMark = 0x9d5f'1ca7'36e2'b84bU;
  [[nodiscard]] bool copy_from(const void* address) const {
    return syscall(SYS_write, ends_[1], address, sizeof(kMark)) == sizeof(kMark);
  }
  [[nodiscard]] bool copy_to(void* address) const {
    return syscall(SYS_read, ends_[0], address, sizeof(kMark)) == sizeof(kMark);
  }

  std::array<int, 2> ends_{-1, -1};
};

class CasesOfDeletion : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Strategies, CasesOfDeletion, all_ranks(), parameters_name);

// No address that the runtime was seen to use is its memory any more when the last owner lets go.
TEST_P(CasesOfDeletion, Case47DeletingTheModelFreesItsMemoryAtOnce) {
  for (const bool in_a_window : {false, true}) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      std::map<const void*, std::string> used;  // address, and what was done there
      c10::weak_intrusive_ptr<c10::StorageImpl> gradient{c10::intrusive_ptr<c10::StorageImpl>()};
      auto net = std::make_shared<SmallNet>(3, 128, Layers::fused);
      const std::weak_ptr<SmallNet> watched = net;
      auto model = watched_shard(group, net, net->units(), options());
      trace::Recorder recorder;
      for (int step = 0; step < 4; ++step) {  // until the plans stay what they are
        if (step == 3) model->device().observe(&recorder);
        for (int index = 0; index < 2; ++index) {
          const auto scope = model->microbatch(index == 1 && !(in_a_window && step == 3));
          small_loss(net->run(small_batch(128, group.rank(), index))).backward();
        }
      }
      model->device().unobserve(&recorder);
      for (const auto& operation : recorder.operations()) {
        const auto is = [&](const char* what) { return operation.name.starts_with(what); };
        if (is("grad ") || is("wgrad ") || is("late wgrad ")) continue;
        // Gradients are libtorch's memory when sharded: what a sum writes and adds to, and an optimizer
        // reads.
        const bool sum = is("reduce ");
        const bool update = is("update ");
        for (const auto& range : operation.reads) {
          const bool adds = sum && range.begin == operation.writes.front().begin;
          if (!adds && !update) used[range.begin] = operation.name;
        }
        for (const auto& range : operation.writes) {
          if (!sum) used[range.begin] = operation.name;
        }
      }
      for (const at::Tensor& shard : model->shards()) {
        if (shard.numel() == 0) continue;
        used[shard.data_ptr()] = "main weights";
        gradient = shard.grad().storage().getWeakStorageImpl();
      }
      EXPECT_GT(used.size(), 4U);
      group.barrier();  // nobody works there any more
      const Marks marks;
      for (const auto& [address, what] : used) EXPECT_TRUE(marks.write(address)) << what;
      group.barrier();
      model.reset();
      net.reset();
      group.barrier();
      EXPECT_TRUE(watched.expired());
      EXPECT_TRUE(gradient.expired());
      for (const auto& [address, what] : used) EXPECT_FALSE(marks.is_at(address)) << what;
      group.barrier();
    });
  }
}

// A graph that outlives the model keeps its input's memory, not the weights': its backward says so.
TEST(CasesOfMemory, Case47AGraphThatOutlivesTheModelSaysSo) {
  run_watched_ranks(1, [&](comm::PeerGroup& group) {
    auto net = std::make_shared<SmallNet>(2, 8, Layers::fused);
    auto model = watched_shard(group, net, net->units(), sharded_sum());
    const at::Tensor loss = small_loss(net->run(small_batch(8, 0)));
    model.reset();
    expect_in(thrown_text<std::exception>([&] { loss.backward(); }), "no longer exists");
  });
}

}  // namespace
}  // namespace fsdpp::test::memory_test
