#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/dist/random_model.h"

namespace fsdpp::test {

/// One rank of a random training beside one process that has all ranks' batches and shards nothing: windows
/// of forwards, backwards, evaluations, steps and clears in an order that is drawn, equal on all ranks. The
/// running test fails where gradients, weights or outputs differ.
class RandomTraining {
 public:
  RandomTraining(const RandomConfig& config, unsigned seed, comm::PeerGroup& group);

  void run();
  [[nodiscard]] const std::string& script() const { return script_; }  // what was done so far

 private:
  using Loss = std::function<at::Tensor(RandomNet& net, int rank)>;
  enum class End { step, step_and_keep, clear, keep };

  void window();
  void microbatch(bool last);
  void act();
  [[nodiscard]] bool end_window();

  // One backward, or several, of a microbatch; the oracle's for all ranks.
  void plain();
  void two_graphs();
  void graph_twice();
  void forward_alone();
  void forward_that_raises();
  void backward_that_raises();
  void gradient_of_an_activation();
  void some_weights();
  void side_output();
  void two_branches();
  void left_out_block();
  void held();

  [[nodiscard]] Loss loss_of(int index) const;
  void backward(const at::Tensor& loss, bool retain = false) const;
  void train(const Loss& loss, int times = 1);
  void follow(const Loss& loss, int times = 1, const std::vector<std::size_t>& weights = {});
  void zero(bool to_none);
  void evaluate();
  [[nodiscard]] bool small_enough() const;
  void expect_the_gradients();
  void expect_the_weights();

  const RandomConfig& config_;
  comm::PeerGroup& group_;
  Draw draw_;
  std::shared_ptr<RandomNet> net_;
  std::shared_ptr<ShardedModel> model_;
  RandomNet oracle_;
  std::string script_;
  int next_ = 0;  // batch
};

}  // namespace fsdpp::test
