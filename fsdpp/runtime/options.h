#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

namespace fsdpp::runtime {

/// What is sharded, and with that what is communicated when.
enum class Strategy {
  no_shard,            // everything whole on each rank; all-reduce of gradients at the window's last backward
  optim_grads_params,  // ZeRO-3 (Rajbhandari et al. 2020): weights gathered in forward and backward,
                       // gradients reduced every backward, optimizer state on shards
};

/// What the reduce makes of the ranks' gradients.
enum class Combine {
  mean,  // sum divided by the number of ranks
  sum,
};

struct Options {
  Strategy strategy = Strategy::optim_grads_params;
  Combine combine = Combine::mean;
  /// Of the weights that the model reads and that are gathered; nothing: each parameter keeps its own. Main
  /// weights are fp32 either way, and taken from the parameters before they are rounded to this.
  std::optional<c10::ScalarType> model_dtype;
  /// Embeddings of at least so many bytes are exchanged by rows where their unit asks for it (see UnitSpec),
  /// the strategy shards weights and ranks address each other's memory; negative: never.
  int64_t row_exchange_bytes = int64_t{64} << 20;
  /// Of gradients on their way to their owners, fp32 or bf16; the ranks' are summed in fp32 either way. bf16
  /// halves slots and traffic, and rounds what each rank contributes to others' shards. Under
  /// optim_grads_params, where ranks address each other's memory.
  c10::ScalarType wire_dtype = c10::ScalarType::Float;
  /// Full weights with memory of their own, where they stay: gathered once per publication, not in each
  /// forward and backward (as under FSDP2's reshard_after_forward=False), and this rank's shard is published
  /// in place. Units of up to so many bytes in all, the root and the last ones first; negative: every unit.
  int64_t keep_gathered_bytes = 0;
  /// In groups of at least so many elements, rows of a weight's gradient that belong to this rank do not go
  /// through the slot, unless they are few: their GEMM runs one unit later and adds onto what came from the
  /// peers. (More launches, fewer bytes.) Where ranks address each other's memory and the layer offers it
  /// (SinkOwner::contribute); negative: never.
  int64_t late_group_elements = int64_t{1} << 25;
  bool fused = true;  // fused layers write their weight gradients straight into the gradient slot
};

[[nodiscard]] std::string to_string(Strategy strategy);
/// Throws UsageError that lists the names there are.
[[nodiscard]] Strategy strategy_from(const std::string& name);

}  // namespace fsdpp::runtime
