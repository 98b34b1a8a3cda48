// Cases of shapes and state that broke other runtimes (numbers: the project's list of cases).
#include <ATen/ops/isfinite.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <cstring>

#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/clip.h"
#include "tests/support/gate_device.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::cases_state_test {
namespace {

using device::Operation;
using device::OperationKind;

constexpr int64_t kDim = 8;

class CasesOfState : public OnRanks {
 public:
  static std::shared_ptr<ShardedModel> shard(comm::PeerGroup& group, const std::shared_ptr<SmallNet>& net) {
    return watched_shard(group, net, net->units(), options());
  }
};
INSTANTIATE_TEST_SUITE_P(Strategies, CasesOfState, all_ranks(), parameters_name);

void backward(SmallNet& net, int rank, int index = 0) {
  small_loss(net.run(small_batch(kDim, rank, index))).backward();
}

// One parameter of each awkward shape; its forward uses each of them.
class Shapes : public torch::nn::Module {
 public:
  explicit Shapes(const std::vector<std::vector<int64_t>>& all) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      list.push_back(register_parameter(text("p", i), integers(all[i], 40 + i, 3)));
    }
    transposed = register_parameter("transposed", integers({7, 5}, 90, 3).t());
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& input) const {
    at::Tensor total = at::sum(transposed * integers(transposed.sizes(), 8));
    for (const at::Tensor& parameter : list)
      total = total + at::sum(parameter * integers(parameter.sizes(), 9, 2));
    return total * at::sum(input);
  }
  std::vector<at::Tensor> list;
  at::Tensor transposed;
};

TEST_P(CasesOfState, Case23AwkwardShapes) {
  const std::vector<std::vector<int64_t>> all = {{1, 6}, {3, 7}, {5, 2}, {33, 9},  {1},
                                                 {},     {0, 4}, {13},   {64, 64}, {3}};
  std::vector<std::vector<std::vector<int64_t>>> models = {all};
  for (const auto& shape : all) models.push_back({shape});
  models.push_back({{0, 4}, {0}});
  for (const auto& shapes : models) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const auto module = std::make_shared<Shapes>(shapes);
      const auto model =
          watched_shard(group, module, std::vector<std::shared_ptr<torch::nn::Module>>{}, options());
      Shapes oracle(shapes);
      expect_weights(*model, oracle);
      for (int step = 0; step < 2; ++step) {
        call(*module, small_batch(kDim, group.rank(), step)).backward();
        for (const at::Tensor& batch : all_batches(kDim, ranks(), step)) oracle.forward(batch).backward();
        expect_gradients(*model, oracle);
        integer_step(model->shards());
        integer_step(oracle.parameters());
        expect_weights(*model, oracle);
        model->zero_grad();
        clear(oracle);
      }
      EXPECT_TRUE(model->at_rest());
    });
  }
}

// Every byte that the runtime takes and has not written is NaN: slots, full weights, and with them all
// padding.
TEST_P(CasesOfState, Case27PaddingAndStaleBytesAreNaNAndReachNothing) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    auto lanes = std::make_unique<GateDevice>();
    lanes->after = [](const Operation& operation) {
      if (operation.kind != OperationKind::acquire) return;
      std::memset(const_cast<void*>(operation.writes[0].begin), 0xFF, operation.writes[0].size);
    };
    const auto net = std::make_shared<SmallNet>(3, 9, Layers::fused);
    const auto model = watched_shard(group, net, net->units(), options(), std::move(lanes));
    optim::AdamW optimizer(*model, {});
    SmallNet oracle(3, 9, Layers::oracle);
    for (int step = 0; step < 3; ++step) {
      net->skipped = step == 1 ? std::set<int>{group.rank() % 3} : std::set<int>{};
      for (int index = 0; index < 2; ++index) {
        const auto scope = model->microbatch(index == 1);
        small_loss(net->run(small_batch(9, group.rank(), index))).backward();
      }
      for (const at::Tensor& gradient : model->full_gradients())
        EXPECT_TRUE(at::isfinite(gradient).all().item<bool>());
      EXPECT_TRUE(std::isfinite(optim::clip_grad_norm(*model, 1.0)));
      optimizer.step(0.01);
      for (const at::Tensor& weight : model->full_weights())
        EXPECT_TRUE(at::isfinite(weight).all().item<bool>());
      if (step != 1) model->zero_grad();  // once gradients are left over
    }
  });
}

TEST_P(CasesOfState, Case30AForwardThatStopsOrRaisesThenANormalStep) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(4, kDim, Layers::fused);
    const auto model = shard(group, net);
    SmallNet oracle(4, kDim, Layers::oracle);
    for (int step = 0; step < 3; ++step) {
      net->blocks[2]->raises = true;
      EXPECT_THROW((void)net->run(small_batch(kDim, group.rank(), step)), std::runtime_error);
      EXPECT_TRUE(model->at_rest()) << "after a forward that raised";
      net->blocks[2]->raises = false;
      (void)call_as(*net, [&] { return net->through(*net->blocks[0], small_batch(kDim, group.rank())); });
      (void)call(*net->blocks[1], small_batch(kDim, group.rank()));  // a unit alone
      backward(*net, group.rank(), step);
      oracle_backward(oracle, all_batches(kDim, ranks(), step));
      expect_gradients(*model, oracle);
      EXPECT_TRUE(model->at_rest());
      integer_step(model->shards());
      integer_step(oracle.parameters());
      expect_weights(*model, oracle);
      model->zero_grad();
      clear(oracle);
    }
  });
}

TEST_P(CasesOfState, Case31AnotherMethodAsEntryPoint) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto model = shard(group, net);
    SmallNet oracle(2, kDim, Layers::oracle);
    const auto encode = [](SmallNet& of, const at::Tensor& x) { return of.first->forward(x); };
    small_loss(call_as(*net, [&] { return encode(*net, small_batch(kDim, group.rank())); })).backward();
    for (const at::Tensor& batch : all_batches(kDim, ranks())) small_loss(encode(oracle, batch)).backward();
    expect_gradients(*model, oracle);
    const auto half = [](SmallBlock& block, const at::Tensor& x) { return at::relu(block.up->forward(x)); };
    SmallBlock& block = *net->blocks[1];
    small_loss(call_as(block, [&] { return half(block, small_batch(kDim, group.rank())); })).backward();
    for (const at::Tensor& batch : all_batches(kDim, ranks()))
      small_loss(half(*oracle.blocks[1], batch)).backward();
    expect_gradients(*model, oracle);
    EXPECT_TRUE(model->at_rest());
  });
}

TEST_P(CasesOfState, Case33AMovingAverageOfShardsIsTheAverageOfTheFullWeights) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
    const auto model = shard(group, net);
    SmallNet oracle(2, kDim, Layers::oracle);
    const auto copies = [](const std::vector<at::Tensor>& of) {
      std::vector<at::Tensor> result;
      for (const at::Tensor& tensor : of) result.push_back(tensor.detach().clone());
      return result;
    };
    const auto average = [](std::vector<at::Tensor>& into, const std::vector<at::Tensor>& of) {
      for (std::size_t i = 0; i < into.size(); ++i) into[i].mul_(0.5).add_(of[i].detach(), 0.5);
    };
    std::vector<at::Tensor> ours = copies(model->shards()), expected = copies(oracle.parameters());
    for (int step = 0; step < 2; ++step) {
      backward(*net, group.rank(), step);
      oracle_backward(oracle, all_batches(kDim, ranks(), step));
      integer_step(model->shards());
      integer_step(oracle.parameters());
      average(ours, model->shards());
      average(expected, oracle.parameters());
    }
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < ours.size(); ++i) model->shards()[i].copy_(ours[i]);
    for (std::size_t i = 0; i < expected.size(); ++i) oracle.parameters()[i].copy_(expected[i]);
    const at::Tensor input = small_batch(kDim, group.rank());
    expect_same(net->run(input), oracle.run(input), "output of the averaged weights");
    model->weights_changed();
    expect_weights(*model, oracle);
  });
}

TEST_P(CasesOfState, Case36TheForwardAfterAStepOrALoadSeesTheNewWeights) {
  for (const bool promised : {false, true}) {
    run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
      const auto net = std::make_shared<SmallNet>(2, kDim, Layers::fused);
      const auto model = shard(group, net);
      if (promised) model->promise_to_tell();
      SmallNet oracle(2, kDim, Layers::oracle), other(2, kDim, Layers::oracle, /*seed=*/77);
      const at::Tensor input = small_batch(kDim, group.rank());
      backward(*net, group.rank());
      oracle_backward(oracle, all_batches(kDim, ranks()));
      integer_step(model->shards());
      if (promised) model->weights_changed();
      integer_step(oracle.parameters());
      expect_same(net->run(input).detach(), oracle.run(input).detach(), "output after a step");

      backward(*net, group.rank());  // in the middle of a window
      std::vector<at::Tensor> loaded;
      for (const auto& [name, sizes] : model->parameters()) loaded.push_back(other.named_parameters()[name]);
      model->load_weights(loaded);
      expect_same(net->run(input).detach(), other.run(input).detach(), "output after a load");
      expect_weights(*model, other);
      const std::string message = thrown_text([&] {
        loaded[0] = integers({3, 3}, 1);
        model->load_weights(loaded);
      });
      expect_in(message, "first.");
    });
  }
}

// Reentrant recompute as users write it: the forward runs again inside the backward.
class Recompute : public torch::autograd::Function<Recompute> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            SmallBlock* block) {
    context->save_for_backward({input});
    context->saved_data["block"] = reinterpret_cast<int64_t>(block);
    return fsdpp::call(*block, input);  // without gradients
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto* block = reinterpret_cast<SmallBlock*>(context->saved_data["block"].toInt());
    const at::Tensor input = context->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode with_gradient(true);
    const at::Tensor output = fsdpp::call(*block, input);
    torch::autograd::backward({output}, {gradients[0]});
    return {input.grad(), at::Tensor()};
  }
};

// A frozen base with small trained biases.
void freeze_base(SmallNet& net) {
  for (const auto& item : net.named_parameters()) {
    if (item.key().ends_with("weight")) item.value().requires_grad_(false);
  }
}

TEST_P(CasesOfState, Case38AdaptersOfAFrozenBaseGetGradientsAlsoUnderRecompute) {
  for (const bool recompute : {false, true}) {
    for (const Layers layers : {Layers::fused, Layers::unfused}) {
      run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
        const auto net = std::make_shared<SmallNet>(3, kDim, layers);
        freeze_base(*net);
        const auto model = shard(group, net);
        SmallNet oracle(3, kDim, Layers::oracle);
        freeze_base(oracle);
        for (int step = 0; step < 2; ++step) {
          const at::Tensor output = call_as(*net, [&] {
            at::Tensor x = net->first->forward(small_batch(kDim, group.rank(), step));
            for (const auto& block : net->blocks) {
              x = recompute ? Recompute::apply(x, block.get()) : net->through(*block, x);
            }
            return net->last->forward(x);
          });
          small_loss(output).backward();
          oracle_backward(oracle, all_batches(kDim, ranks(), step));
          expect_gradients(*model, oracle);
          EXPECT_TRUE(model->at_rest());
        }
        for (std::size_t i = 0; i < model->shards().size(); ++i) {
          const bool frozen = model->parameters()[i].first.ends_with("weight");
          EXPECT_EQ(model->shards()[i].requires_grad(), !frozen);
          EXPECT_EQ(model->shards()[i].grad().defined(), !frozen);
        }
      });
    }
  }
}

}  // namespace
}  // namespace fsdpp::test::cases_state_test
