#pragma once

#include <cstdint>
#include <vector>

#include "fsdpp/buffer/sharded_buffer.h"
#include "fsdpp/runtime/parameter_group.h"
#include "fsdpp/runtime/peers.h"
#include "fsdpp/runtime/sink.h"

namespace fsdpp::runtime {

/// Weight gradients of rows that this rank owns, kept back until the peers' sum of them has come: the GEMM
/// then adds onto it. Such rows have no part in the slot, and no sum of ranks reads them again.
///
/// A group's writers run when the next group's reduce has been launched: one unit later, by when the pull of
/// the peers' slices is over. Until then they keep the activations and gradients that they read alive.
class LateRows {
 public:
  /// `at_least`: elements of the least group that has late rows, see Options::late_group_elements.
  LateRows(Peers& peers, float scale, int64_t at_least) : peers_(peers), scale_(scale), at_least_(at_least) {}

  /// Rows of `parameter` that may be late; none when its group is not summed by us.
  [[nodiscard]] Rows of(const Parameter& parameter) const;

  /// Appends `target`, cut where late rows of its parameter begin and end if it has any; those are for the
  /// peers' sum alone.
  void cut(const buffer::ReduceTarget& target, const Parameter& parameter,
           std::vector<buffer::ReduceTarget>& targets) const;
  /// `group`'s reduce into `targets` is over with `reduced`: its writers are due.
  void due(ParameterGroup& group, const std::vector<buffer::ReduceTarget>& targets,
           const device::Event& reduced);
  /// Runs what is due, but for the writers of `except`.
  void run(const ParameterGroup* except = nullptr);
  /// Drops what is due for gradients that were cleared, replaced or written since: by whoever gave a backward
  /// up that raised half-way.
  void drop_stale();

 private:
  /// One parameter's late rows and where they go.
  struct Due {
    const Parameter* parameter;
    Rows rows;
    std::vector<RowWriter> writers;
    at::Tensor view;      // [rows, ...] of the gradient shard
    at::Tensor gradient;  // the shard's, which shows it
    int64_t version;      // of that, when it was due
    bool added;           // the peers' sum was added to the gradient, scaled; else it lies there as pulled
    device::Event reduced;
  };

  void write(const Due& due);

  Peers& peers_;
  float scale_;
  int64_t at_least_;
  std::vector<Due> due_;
};

}  // namespace fsdpp::runtime
