#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdpp/runtime/sink.h"

namespace fsdpp::runtime {

class BackwardPass;
struct ParameterGroup;

/// One distinct parameter of a sharded model (tied ones count once).
class Parameter final : public SinkOwner {
 public:
  void ensure_resident() override;
  std::optional<GradSink> open() override;
  void report() override;
  bool contribute(const RowWriter& write) override;
  bool exchanges_rows() const noexcept override;
  at::Tensor gather_rows(const at::Tensor& indices, const std::shared_ptr<RowClaim>& claim) override;
  bool add_rows(const at::Tensor& indices, const at::Tensor& rows, RowClaim& claim) override;

  std::string name;  // path in the root module, of its first place
  at::Tensor full;   // the module's own tensor: its storage comes and goes, its identity stays
  std::vector<int64_t> sizes;
  int index = 0;  // in its group
  ParameterGroup* group = nullptr;
  BackwardPass* backward = nullptr;  // null once the sharded model is gone

  at::Tensor shard;          // what the optimizer updates: main weights, a leaf
  int64_t shard_offset = 0;  // where its gradient begins in this rank's shard of the group's, elements
  at::Tensor guard_grad;     // what `full.grad()` is between backwards: throws when an optimizer reads it
  std::shared_ptr<torch::autograd::Node> accumulator;

  bool expected = false;        // its accumulator runs in the current graph task
  bool seen = false;            // and has run
  bool contributed = false;     // its range of the gradient slot holds values, but for late rows
  at::Tensor staged;            // a contribution that is delayed, while it is being written
  std::vector<RowWriter> late;  // of rows that wait for the peers' sum (LateRows)

 private:
  [[nodiscard]] BackwardPass& live() const;
  void require_no_graph() const;
};

}  // namespace fsdpp::runtime
