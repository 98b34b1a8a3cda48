#include "fsdpp/runtime/parameter.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "fsdpp/base/error.h"
#include "fsdpp/runtime/backward_pass.h"
#include "fsdpp/runtime/row_exchange.h"

namespace fsdpp::runtime {

BackwardPass& Parameter::live() const {
  require(backward != nullptr, "the sharded model of parameter ", name,
          " no longer exists; keep it alive until its last backward");
  return *backward;
}

void Parameter::ensure_resident() { live().gather_on_demand(*this); }

std::optional<GradSink> Parameter::open() {
  BackwardPass& pass = live();
  require_no_graph();
  return pass.open(*this);
}

void Parameter::report() { live().report(*this); }

bool Parameter::contribute(const RowWriter& write) {
  BackwardPass& pass = live();
  require_no_graph();
  return pass.contribute(*this, write);
}

bool Parameter::exchanges_rows() const noexcept { return group->rows != nullptr; }

at::Tensor Parameter::gather_rows(const at::Tensor& indices, const std::shared_ptr<RowClaim>& claim) {
  static_cast<void>(live());
  return group->rows->gather(indices, claim);
}

bool Parameter::add_rows(const at::Tensor& indices, const at::Tensor& rows, RowClaim& claim) {
  BackwardPass& pass = live();
  require_no_graph();
  return pass.add_rows(*this, indices, rows, claim);
}

void Parameter::require_no_graph() const {
  const bool by_hand = torch::autograd::get_current_graph_task_id() == -1;
  require(
      by_hand || !at::GradMode::is_enabled(), "parameter ", name,
      ": a fused weight gradient has no graph, but this backward was asked for one (create_graph); "
      "use Options{.fused = false} for higher derivatives, and hold_all() from before the forward until the "
      "last of them has been taken");
}

}  // namespace fsdpp::runtime
