// The example of docs/custom_gradients.md: a custom autograd function that asks the sink, in every strategy
// and without a unit.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

#include "fsdpp/runtime/call.h"
#include "fsdpp/runtime/own_gradients.h"
#include "fsdpp/trace/recorder.h"
#include "tests/dist/scale_layer.h"
#include "tests/support/hazard_watch.h"
#include "tests/support/small_model_ranks.h"

namespace fsdpp::test::custom_sink_test {
namespace {

constexpr int64_t kWidth = 70;  // more than one rank's part of it

class ScaleNet : public torch::nn::Module {
 public:
  ScaleNet() { weight = register_parameter("weight", at::full({kWidth}, 2.0)); }
  // The weight is used twice.
  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const {
    return example::Scale::apply(example::Scale::apply(x, weight), weight);
  }
  at::Tensor weight;
};

class CustomSink : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Strategies, CustomSink, all_ranks(), parameters_name);

TEST_P(CustomSink, AForeignLayersGradientGoesToTheSlot) {
  run_watched_ranks(ranks(), [&](comm::PeerGroup& group) {
    const auto net = std::make_shared<ScaleNet>();
    const auto model =
        watched_shard(group, net, std::vector<std::shared_ptr<torch::nn::Module>>{}, options());
    trace::Recorder recorder;
    model->device().observe(&recorder);
    for (int index = 0; index < 2; ++index) {
      const auto scope = model->microbatch(index == 1);
      call(*net, at::full({3, kWidth}, 1.0 + group.rank() + index)).sum().backward();
    }
    model->device().unobserve(&recorder);
    EXPECT_EQ(recorder.count(device::OperationKind::run, "grad "), 0U) << "autograd brought nothing";
    double inputs = 0;
    for (int rank = 0; rank < ranks(); ++rank) inputs += 2 * (1.0 + rank) + 1;
    // d/dw of the sum over 3 rows of x w^2 is 6 x w.
    expect_same(model->full_gradients().at(0), at::full({kWidth}, 6 * 2.0 * inputs), "weight");
  });
}

TEST(CustomSinkAlone, AddsIntoTheWeightsOwnGradient) {
  const at::Tensor weight = at::full({kWidth}, 2.0).requires_grad_();
  const runtime::OwnGradients own({weight});
  for (int index = 0; index < 2; ++index)
    example::Scale::apply(at::ones({3, kWidth}), weight).sum().backward();
  expect_same(weight.grad(), at::full({kWidth}, 6.0), "weight");
}

std::string contents(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

TEST(CustomSinkAlone, TheDocumentShowsWhatRuns) {
  const std::string header = contents(FSDPP_DOCS "/../tests/dist/scale_layer.h");
  const std::size_t first = header.find("/// x [..., n]");
  const std::string code = header.substr(first, header.find("\n\n}  // namespace example") - first);
  EXPECT_NE(contents(FSDPP_DOCS "/custom_gradients.md").find("```cpp\n" + code + "\n```"), std::string::npos);
}

}  // namespace
}  // namespace fsdpp::test::custom_sink_test
