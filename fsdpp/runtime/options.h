#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <optional>
#include <string>
#include <variant>

namespace fsdpp::runtime {

/// What is sharded, and with that what is communicated when. The stages are those of ZeRO (Rajbhandari et al.
/// 2020).
enum class Strategy {
  no_shard,            // everything whole on each rank; all-reduce of gradients at the window's last backward
  optim,               // ZeRO-1: optimizer state and main weights in shards; gradients whole until they are
                       // reduced at the window's last backward; weights gathered once per publication
  optim_grads,         // ZeRO-2: gradients reduced into shards every backward
  optim_grads_params,  // ZeRO-3: weights gathered in forward and backward too
};

inline constexpr std::array kStrategies = {Strategy::no_shard, Strategy::optim, Strategy::optim_grads,
                                           Strategy::optim_grads_params};

/// Main weights and optimizer state lie in shards, and peers read published weights.
[[nodiscard]] constexpr bool shards_optimizer(Strategy strategy) noexcept {
  return strategy != Strategy::no_shard;
}
/// Every backward reduces gradients into shards; else only a window's last one reduces.
[[nodiscard]] constexpr bool shards_gradients(Strategy strategy) noexcept {
  return strategy == Strategy::optim_grads || strategy == Strategy::optim_grads_params;
}
/// Full weights come and go; else they stay where they are.
[[nodiscard]] constexpr bool shards_parameters(Strategy strategy) noexcept {
  return strategy == Strategy::optim_grads_params;
}

/// What the reduce makes of the ranks' gradients.
enum class Combine {
  mean,  // sum divided by the number of ranks: of the mesh, also where they have other experts
  sum,
};

/// Where full weights go when a unit's forward ends, as FSDP2's reshard_after_forward says it: true: nowhere,
/// they are gathered again from all ranks that shard; false: they stay; n, a divisor of these ranks: sharded
/// over n neighbours, from which they are gathered until new weights are published. They lie in memory of
/// their own, 1/n of the weights. Between two publications in which any rank runs forwards of the root with
/// gradient, every rank does; without such forwards n is as true.
using Reshard = std::variant<bool, int>;

/// How main weights are stored: what optimizers update.
enum class MainWeights {
  fp32,
  model_dtype,  // as the model reads them: half the memory, and an update below half a unit in the last place
                // is lost
};

struct Options {
  Strategy strategy = Strategy::optim_grads_params;
  Combine combine = Combine::mean;
  /// What the sum is divided by instead.
  std::optional<double> divisor;
  /// Of the weights that the model reads and that are gathered; nothing: each parameter keeps its own. Main
  /// weights are taken from the parameters before they are rounded to this.
  std::optional<c10::ScalarType> model_dtype;
  MainWeights main_weights = MainWeights::fp32;  // frozen ones given in their model dtype stay in it
  /// Of gradients while they add up, and of the shards' `.grad`: fp32 or bf16. Ranks' are summed in fp32 and
  /// rounded once, when they are stored or added. Where slots carry a window's sum (no_shard, optim) they
  /// have this dtype, also on the wire. bf16 microbatches 256 and 1 add up to 256.
  c10::ScalarType accumulation_dtype = c10::ScalarType::Float;
  /// Floating-point tensors that the root's forward returns are cast to it (a unit's: UnitChoice); nothing:
  /// they stay as they are.
  std::optional<c10::ScalarType> output_dtype;
  /// Embeddings of at least so many bytes are exchanged by rows where their unit asks for it (see UnitSpec),
  /// the strategy shards weights and ranks address each other's memory; negative: never.
  int64_t row_exchange_bytes = int64_t{64} << 20;
  /// Of gradients on their way to their owners, fp32 or bf16; the ranks' are summed in fp32 either way. bf16
  /// halves slots and traffic, and rounds what each rank contributes to others' shards. Where every backward
  /// reduces, so that no slot carries a window's sum, and ranks address each other's memory.
  c10::ScalarType wire_dtype = c10::ScalarType::Float;
  /// Under optim_grads_params; other strategies' weights stay in any case.
  Reshard reshard_after_forward = true;
  /// Under optim_grads_params, full weights with memory of their own, where they stay: gathered once per
  /// publication, not in each forward and backward (as with reshard_after_forward = false), and this
  /// rank's shard is published in place. Units of up to so many bytes in all, the root and the last ones
  /// first; negative: every unit.
  int64_t keep_gathered_bytes = 0;
  /// Full weights gathered in advance, beside those in use: as many of the next units as fit together in so
  /// many bytes; 0: none, and compute waits for each gather. Nothing: the next unit, whatever its size. Each
  /// rank gives the same.
  std::optional<int64_t> prefetch_bytes;
  /// In groups of at least so many elements, rows of a weight's gradient that belong to this rank do not go
  /// through the slot, unless they are few: their GEMM runs one unit later and adds onto what came from the
  /// peers. (More launches, fewer bytes.) Where ranks address each other's memory and the layer offers it
  /// (SinkOwner::contribute); negative: never.
  int64_t late_group_elements = int64_t{1} << 25;
  /// On a hybrid mesh: main weights and optimizer state are sharded over the replicas too (HFSDP), which
  /// gather each other's new weights after an optimizer step.
  bool shard_optimizer_over_replicas = false;
  /// Main weights and the optimizer's state lie in host memory (pinned on a GPU's host), and an optimizer of
  /// the CPU updates them: a window's reduced gradients come down in fp32, new weights go up in the model's
  /// dtype (ZeRO-Offload, Ren et al. 2021). shards() and, after a window's last backward, their gradients are
  /// CPU tensors. Not with no_shard.
  bool offload = false;
  /// Gradients of shards lie at the same addresses in every step (for graphs, and others' kernels): one that
  /// a user keeps beyond zero_grad is overwritten. So it is anyway but where gradients are sharded on a flat
  /// mesh.
  bool keep_gradient_addresses = false;
  /// Weight gradients are not computed in the backward but by ShardedModel::backward_dw(), and nothing is
  /// reduced before. Until then their layers' inputs and the gradients of their outputs stay in memory.
  bool delay_wgrad = false;
  bool fused = true;  // fused layers write their weight gradients straight into the gradient slot
};

/// What a unit chooses for itself (UnitSpec::choice). What it leaves open, and what is not here, is as
/// Options say for all. Equal on all ranks.
struct UnitChoice {
  std::optional<Strategy> strategy;
  std::optional<c10::ScalarType> model_dtype;
  std::optional<MainWeights> main_weights;
  std::optional<c10::ScalarType> accumulation_dtype;
  std::optional<c10::ScalarType> wire_dtype;
  std::optional<c10::ScalarType> output_dtype;  // nothing: outputs stay as they are
  std::optional<Reshard> reshard_after_forward;
};

/// `options` as the unit that made `choice` has them.
[[nodiscard]] Options with(const Options& options, const UnitChoice& choice);

[[nodiscard]] std::string to_string(Strategy strategy);
/// Throws UsageError that lists the names there are.
[[nodiscard]] Strategy strategy_from(const std::string& name);

}  // namespace fsdpp::runtime
