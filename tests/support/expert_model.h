#pragma once

#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "fsdpp/nn/grouped_linear.h"
#include "tests/support/small_model_net.h"

namespace fsdpp::test {

inline constexpr int64_t kExpertDim = 8;
inline constexpr int64_t kExperts = 4;

/// Of the experts' weights.
enum class Form { one, list };

/// Experts of one layer: y = W[e] x for the rows of expert e.
class Experts : public torch::nn::Module {
 public:
  Experts(Form form, bool oracle, uint64_t seed = 40) : oracle_(oracle) {
    std::vector<at::Tensor> each;
    for (int64_t e = 0; e < kExperts; ++e)
      each.push_back(integers({kExpertDim, kExpertDim}, seed + static_cast<uint64_t>(e)));
    if (form == Form::one) {
      weights = {register_parameter("weight", at::stack(each))};
    } else {
      for (int64_t e = 0; e < kExperts; ++e)
        weights.push_back(
            register_parameter("weight" + std::to_string(e), each[static_cast<std::size_t>(e)]));
    }
  }
  [[nodiscard]] at::Tensor of(int64_t expert) const {
    return weights.size() == 1 ? weights[0][expert] : weights[static_cast<std::size_t>(expert)];
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& rows, const at::Tensor& ends) const {
    if (!oracle_)
      return weights.size() == 1 ? nn::grouped_linear(rows, weights[0], ends)
                                 : nn::grouped_linear(rows, weights, ends);
    std::vector<at::Tensor> outputs;
    int64_t begin = 0;
    for (int64_t e = 0; e < kExperts; ++e) {
      const int64_t end = ends[e].item<int64_t>();
      outputs.push_back(at::linear(rows.narrow(0, begin, end - begin), of(e)));
      begin = end;
    }
    return at::cat(outputs);
  }

  std::vector<at::Tensor> weights;

 private:
  bool oracle_;
};

/// in (root) -> experts (a unit) -> out (root).
class ExpertNet : public torch::nn::Module {
 public:
  ExpertNet(Form form, Layers layers) : kind(layers) {
    first = register_module("first", std::make_shared<SmallLinear>(kExpertDim, kExpertDim, layers, 7));
    experts = register_module("experts", std::make_shared<Experts>(form, layers == Layers::oracle));
    last = register_module("last", std::make_shared<SmallLinear>(kExpertDim, kExpertDim, layers, 9));
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& rows, const at::Tensor& ends) const {
    const at::Tensor x = first->forward(rows);
    const at::Tensor y = kind == Layers::oracle ? experts->forward(x, ends) : fsdpp::call(*experts, x, ends);
    return last->forward(x + y);
  }
  [[nodiscard]] at::Tensor run(const at::Tensor& rows, const at::Tensor& ends) {
    return kind == Layers::oracle ? forward(rows, ends) : fsdpp::call(*this, rows, ends);
  }

  Layers kind;
  std::shared_ptr<SmallLinear> first, last;
  std::shared_ptr<Experts> experts;
};

/// Rows of each expert for a rank's microbatch: some have none, and at times a rank has none at all.
inline std::vector<int32_t> sizes_of(int rank, int index) {
  if (rank == 1 && index % 3 == 0) return {0, 0, 0, 0};
  std::vector<int32_t> sizes;
  for (int e = 0; e < kExperts; ++e) sizes.push_back((rank + 2 * index + e) % 3);
  sizes[2] = index % 2 == 0 ? 0 : sizes[2];  // on every rank: its gradient is zero, not old bytes
  return sizes;
}

/// Where each expert's rows end.
inline at::Tensor ends_of(const std::vector<int32_t>& sizes) {
  std::vector<int32_t> ends;
  for (const int32_t size : sizes) ends.push_back(size + (ends.empty() ? 0 : ends.back()));
  return at::tensor(ends, at::kInt);
}

/// The backward of a rank's microbatch `index`, where and with the dtype that `place` says.
inline void backward(ExpertNet& net, int rank, int index, at::TensorOptions place = at::kFloat) {
  const at::Tensor ends = ends_of(sizes_of(rank, index));
  const at::Tensor rows = small_batch(kExpertDim, rank, index, ends[kExperts - 1].item<int64_t>());
  const at::Tensor output = net.run(rows.to(place), ends.to(place.device()));
  at::sum(output * integers(output.sizes(), 5).to(place)).backward();
}

}  // namespace fsdpp::test
