#include "fsdpp/runtime/graph_task.h"

#include <torch/csrc/autograd/graph_task.h>

namespace fsdpp::runtime {

bool runs_in_graph_task(torch::autograd::Node* accumulator) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr || nodes->count(accumulator) == 0) return false;
  if (is_plain_backward()) return true;  // everything in the graph runs
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  const auto found = info->find(accumulator);
  return found != info->end() && found->second.needed_;
}

bool is_plain_backward() {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  return info == nullptr || info->empty();
}

}  // namespace fsdpp::runtime
