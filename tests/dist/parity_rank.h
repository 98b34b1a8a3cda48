#pragma once

#include <string>
#include <vector>

#include "fsdpp/comm/peer_group.h"
#include "fsdpp/nn/recompute.h"
#include "fsdpp/runtime/options.h"
#include "tests/support/integer_model.h"
#include "tests/support/sharded_integer_model.h"

// One configuration of the parity tests, and a rank's training of it.
namespace fsdpp::test {

struct ParityConfiguration {
  int ranks;
  runtime::Strategy strategy;
  int microbatches;
  bool set_to_none = true;
  bool tied = false;
  bool fused = true;
  bool rows = false;       // the embedding is exchanged by rows
  bool kept = false;       // full weights stay where they are
  bool late = false;       // own rows are added onto the peers' sum, however few
  bool bf16_wire = false;  // every gradient is an integer that bf16 has
  int replicas = 1;        // of each shard, on a hybrid mesh
  bool parted = false;     // main weights are sharded over the replicas too
  int blocks = 3;
  nn::Recompute recompute = nn::Recompute::none;  // of each block
  bool delayed = false;                           // weight gradients come with backward_dw()
  bool bf16 = false;                              // the model's weights and activations
  bool offload = false;                           // main weights and their gradients in host memory
  bool by_unit = false;                           // units have the strategies in turn, the root `strategy`
  int inner = 0;        // neighbours over which weights are sharded behind the forward; 0: all that shard
  bool narrow = false;  // gradients are stored in bf16, which has all of them; main weights as the model's
  bool c10d = false;    // replicas (of a flat mesh: all ranks) talk through a c10d backend
};

[[nodiscard]] std::string name_of(const ParityConfiguration& configuration);

/// What fully_shard() gets for `net` beside a group or mesh.
[[nodiscard]] runtime::Options options_of(const ParityConfiguration& configuration);
[[nodiscard]] std::vector<runtime::UnitSpec> units_of(const ParityConfiguration& configuration,
                                                      const IntegerNet& net);

/// What plain libtorch makes of it on one process; configurations that differ in nothing that it sees share
/// one. Not for several threads at once.
[[nodiscard]] const std::vector<OracleStep>& oracle_of(const ParityConfiguration& configuration);

/// One rank's training, compared with `oracle` after each step.
void train_like(const std::vector<OracleStep>& oracle, comm::PeerGroup& group,
                const ParityConfiguration& configuration);

}  // namespace fsdpp::test
