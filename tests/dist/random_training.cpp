#include "tests/dist/random_training.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>

namespace fsdpp::test {
namespace {

constexpr int kWindows = 6;
constexpr int kBatchesOfAnAct = 2;
constexpr double kExact = 1 << 22;  // sums of larger integers may leave fp32's 24 bits on their way

// Equal, or beyond what fp32 has of integers.
bool same(const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.sizes() != expected.sizes()) return false;
  if (at::equal(actual, expected)) return true;
  const double largest = expected.abs().max().item<double>();
  return largest > kExact && (actual - expected).abs().max().item<double>() < 1e-4 * largest;
}

bool is_zero(const at::Tensor& gradient) {
  return !gradient.defined() || gradient.count_nonzero().item<int64_t>() == 0;
}

}  // namespace

RandomTraining::RandomTraining(const RandomConfig& config, unsigned seed, comm::PeerGroup& group)
    : config_(config),
      group_(group),
      draw_(seed),
      net_(std::make_shared<RandomNet>(config, /*oracle=*/false)),
      model_(watched_shard(group, net_, net_->units(), config.options)),
      oracle_(config, /*oracle=*/true) {
  if (config.promised) model_->promise_to_tell();
}

void RandomTraining::run() {
  const std::vector<at::Tensor> weights = oracle_.parameters();
  const auto trained = [](const at::Tensor& weight) { return weight.requires_grad() && weight.numel() > 0; };
  if (std::none_of(weights.begin(), weights.end(), trained)) return;
  for (int i = 0; i < kWindows; ++i) {
    window();
    if (!end_window() || testing::Test::HasFailure()) break;
  }
  model_->release_all();
  expect_the_weights();
}

void RandomTraining::window() {
  script_ += "| ";
  const int count = 1 + draw_.below(3);
  const bool declared = count > 1 || draw_.one_in(2);
  for (int i = 0; i < count; ++i) {
    const bool last = i + 1 == count;
    if (draw_.one_in(4)) evaluate();
    if (declared) {
      const auto scope = model_->microbatch(last);
      microbatch(last);
    } else {
      microbatch(last);
    }
  }
  expect_the_gradients();
}

void RandomTraining::microbatch(bool last) {
  act();
  if (last || draw_.one_in(2)) model_->backward_dw();
  if (!last && draw_.one_in(5)) {
    model_->backward_dw();  // what is delayed would stay
    zero(draw_.one_in(2));
  }
  if (draw_.one_in(5)) evaluate();
}

void RandomTraining::act() {
  using Act = void (RandomTraining::*)();
  const std::vector<Act> acts = {&RandomTraining::plain,
                                 &RandomTraining::plain,
                                 &RandomTraining::two_graphs,
                                 &RandomTraining::two_graphs,
                                 &RandomTraining::graph_twice,
                                 &RandomTraining::forward_alone,
                                 &RandomTraining::forward_that_raises,
                                 &RandomTraining::backward_that_raises,
                                 &RandomTraining::gradient_of_an_activation,
                                 &RandomTraining::some_weights,
                                 &RandomTraining::side_output,
                                 &RandomTraining::two_branches,
                                 &RandomTraining::left_out_block,
                                 &RandomTraining::held};
  (this->*draw_.of(acts))();
  next_ += kBatchesOfAnAct;
}

// Whether it makes sense to go on.
bool RandomTraining::end_window() {
  if (!small_enough()) return false;
  if (draw_.one_in(4)) evaluate();
  const End end = draw_.of<End>({End::step, End::step, End::step_and_keep, End::clear, End::keep});
  if (end == End::step || end == End::step_and_keep) {
    script_ += "step ";
    integer_step(model_->shards());
    integer_step(oracle_.parameters());
    if (config_.promised || draw_.one_in(2)) model_->weights_changed();
    if (draw_.one_in(3)) expect_the_weights();
  }
  if (end == End::step || end == End::clear) zero(draw_.one_in(2));
  return true;
}

RandomTraining::Loss RandomTraining::loss_of(int index) const {
  return [index](RandomNet& net, int rank) { return small_loss(net.run(net.batch(rank, index))); };
}

void RandomTraining::backward(const at::Tensor& loss, bool retain) const {
  if (loss.requires_grad()) loss.backward({}, retain);
}

void RandomTraining::train(const Loss& loss, int times) {
  const at::Tensor own = loss(*net_, group_.rank());
  for (int i = 0; i < times; ++i) backward(own, /*retain=*/i + 1 < times);
  follow(loss, times);
}

// `weights`: of these alone; none: of all.
void RandomTraining::follow(const Loss& loss, int times, const std::vector<std::size_t>& weights) {
  std::vector<at::Tensor> inputs;
  for (const std::size_t i : weights) inputs.push_back(oracle_.parameters()[i]);
  for (int rank = 0; rank < config_.ranks; ++rank) {
    const at::Tensor its = loss(oracle_, rank);
    if (!its.requires_grad()) continue;
    for (int i = 0; i < times; ++i)
      torch::autograd::backward({its}, {}, /*retain_graph=*/true, false, inputs);
  }
}

void RandomTraining::plain() {
  script_ += "plain ";
  train(loss_of(next_));
}

void RandomTraining::two_graphs() {
  const bool in_order = draw_.one_in(2);
  script_ += in_order ? "two " : "two-reversed ";
  const std::array<Loss, 2> losses = {loss_of(next_), loss_of(next_ + 1)};
  const std::array<at::Tensor, 2> own = {losses[0](*net_, group_.rank()), losses[1](*net_, group_.rank())};
  backward(own.at(in_order ? 0 : 1));
  if (draw_.one_in(3)) evaluate();
  backward(own.at(in_order ? 1 : 0));
  for (const Loss& loss : losses) follow(loss);
}

void RandomTraining::graph_twice() {
  if (config_.rows && config_.options.delay_wgrad) return plain();  // refused
  script_ += "graph-twice ";
  train(loss_of(next_), 2);
}

void RandomTraining::forward_alone() {
  script_ += "forward ";
  static_cast<void>(loss_of(next_)(*net_, group_.rank()));
  train(loss_of(next_ + 1));
}

void RandomTraining::forward_that_raises() {
  script_ += "forward-raises ";
  RandomBlock& block = *draw_.of(net_->blocks);
  block.raises = true;
  EXPECT_THROW(static_cast<void>(loss_of(next_)(*net_, group_.rank())), std::runtime_error);
  block.raises = false;
  train(loss_of(next_ + 1));
}

// Nothing raises where no gradient comes by.
void RandomTraining::backward_that_raises() {
  script_ += "backward-raises ";
  model_->backward_dw();
  net_->backward_raises = true;
  const at::Tensor loss = loss_of(next_)(*net_, group_.rank());
  net_->backward_raises = false;
  try {
    backward(loss);
    model_->backward_dw();
  } catch (const std::exception& error) {
    expect_in(error.what(), "half-way");
  }
  zero(draw_.one_in(2));
  train(loss_of(next_ + 1));
}

void RandomTraining::gradient_of_an_activation() {
  if (config_.recompute == nn::Recompute::reentrant) return plain();  // has no such
  script_ += "activation ";
  const at::Tensor loss = loss_of(next_)(*net_, group_.rank());
  if (net_->side.requires_grad()) {
    const at::Tensor its = loss_of(next_)(oracle_, group_.rank());
    const auto own = torch::autograd::grad({loss}, {net_->side}, {}, /*retain_graph=*/true);
    EXPECT_TRUE(same(own[0], torch::autograd::grad({its}, {oracle_.side})[0])) << "gradient of an activation";
  }
  backward(loss);
  follow(loss_of(next_));
}

void RandomTraining::some_weights() {
  if (config_.recompute == nn::Recompute::reentrant) return plain();  // knows no inputs
  script_ += "some-weights ";
  const std::vector<at::Tensor> all = net_->parameters();
  std::vector<std::size_t> chosen;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const bool trained = all[i].requires_grad() && all[i].numel() > 0;
    if (trained && (chosen.empty() || draw_.one_in(3))) chosen.push_back(i);
  }
  std::vector<at::Tensor> inputs;
  for (const std::size_t i : chosen) inputs.push_back(all[i]);
  torch::autograd::backward({loss_of(next_)(*net_, group_.rank())}, {}, false, false, inputs);
  follow(loss_of(next_), 1, chosen);
}

void RandomTraining::side_output() {
  script_ += "side ";
  train([index = next_](RandomNet& net, int rank) {
    static_cast<void>(net.run(net.batch(rank, index)));
    return small_loss(net.side);
  });
}

void RandomTraining::two_branches() {
  script_ += "branches ";
  train([one = loss_of(next_), other = loss_of(next_ + 1)](RandomNet& net, int rank) {
    return one(net, rank) + other(net, rank);
  });
}

void RandomTraining::left_out_block() {
  script_ += "left-out ";
  net_->skipped = oracle_.skipped = draw_.below(RandomNet::kBlocks);
  train(loss_of(next_));
  net_->skipped = oracle_.skipped = -1;
}

void RandomTraining::held() {
  script_ += "held ";
  model_->hold_all();
  const std::vector<at::Tensor> own = net_->parameters();
  const std::vector<at::Tensor> its = oracle_.parameters();
  for (std::size_t i = config_.rows ? 1 : 0; i < own.size(); ++i)  // a table that is exchanged by rows: never
    EXPECT_TRUE(same(own[i].detach(), its[i].detach())) << "held weight " << i;
  train(loss_of(next_));
  if (!draw_.one_in(2)) return;
  script_ += "released ";
  model_->release_all();
}

void RandomTraining::zero(bool to_none) {
  script_ += to_none ? "none " : "zero ";
  model_->zero_grad(to_none);
  clear(oracle_);
}

void RandomTraining::evaluate() {
  script_ += "evaluate ";
  const c10::InferenceMode inference(draw_.one_in(2));
  const at::NoGradGuard no_grad;
  const int64_t rows = 1 + draw_.below(3);
  const at::Tensor batch = net_->batch(group_.rank(), 900 + draw_.below(9), rows);
  EXPECT_TRUE(same(net_->run(batch), oracle_.run(batch))) << "an evaluation's output";
}

bool RandomTraining::small_enough() const {
  const std::vector<at::Tensor> weights = oracle_.parameters();
  return std::all_of(weights.begin(), weights.end(), [](const at::Tensor& weight) {
    const at::Tensor& gradient = weight.grad();
    return !gradient.defined() || gradient.numel() == 0 || gradient.abs().max().item<double>() < kExact;
  });
}

void RandomTraining::expect_the_gradients() {
  const std::vector<at::Tensor> gradients = model_->full_gradients();
  const auto names = model_->parameters();
  const auto expected = oracle_.named_parameters();
  for (std::size_t i = 0; i < names.size(); ++i) {
    const at::Tensor& its = expected[names[i].first].grad();
    if (is_zero(its) && is_zero(gradients[i])) continue;  // unused, frozen, or without elements
    ASSERT_TRUE(its.defined() && gradients[i].defined()) << "gradient of " << names[i].first;
    EXPECT_TRUE(same(gradients[i], its)) << "gradient of " << names[i].first << "\n"
                                         << gradients[i] << "\nexpected\n"
                                         << its;
  }
}

void RandomTraining::expect_the_weights() {
  const std::vector<at::Tensor> weights = model_->full_weights();
  const auto expected = oracle_.named_parameters();
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const std::string name = model_->parameters()[i].first;
    EXPECT_TRUE(same(weights[i], expected[name].detach())) << "weight " << name;
  }
}

}  // namespace fsdpp::test
