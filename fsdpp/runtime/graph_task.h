#pragma once

#include <torch/csrc/autograd/function.h>

namespace fsdpp::runtime {

/// True when the backward under way in this thread will run `accumulator`: autograd::grad, and backward with
/// inputs, leave out those of other tensors.
[[nodiscard]] bool runs_in_graph_task(torch::autograd::Node* accumulator);

/// True inside a backward that leaves out nothing that is in its graph.
[[nodiscard]] bool is_plain_backward();

}  // namespace fsdpp::runtime
