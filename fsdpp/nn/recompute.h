#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdpp::nn {

/// What becomes of the activations of a part of the forward (Chen et al. 2016, "Training Deep Nets with
/// Sublinear Memory Cost"; the two ways are those of torch.utils.checkpoint).
enum class Recompute {
  none,           // saved for the backward
  reentrant,      // the part runs without a graph, and again in the backward, which nests one of its own
  non_reentrant,  // the graph is kept without its saved tensors; the first one wanted runs the part again, as
                  // far as the last one needs
};

[[nodiscard]] std::string to_string(Recompute how);
/// Throws UsageError that lists the names there are.
[[nodiscard]] Recompute recompute_from(const std::string& name);

/// body(inputs), with the activations in between recomputed in the backward as `how` says. `body` is kept
/// until then: what it refers to must live on (capture by value). It must do the same in both runs; it sees
/// the default generators (of the CPU and of the inputs' GPU) and autocast as they were. Units are entered in
/// it as anywhere (fsdpp::call).
///
/// reentrant: gradients flow through `inputs` alone; throws UsageError when none requires one (the weights in
/// `body` would get none). Not under autograd::grad, nor create_graph.
[[nodiscard]] std::vector<at::Tensor> recompute(
    Recompute how, const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& body,
    const std::vector<at::Tensor>& inputs);
/// The same with one input and one output.
[[nodiscard]] at::Tensor recompute(Recompute how, const std::function<at::Tensor(const at::Tensor&)>& body,
                                   const at::Tensor& input);

}  // namespace fsdpp::nn
