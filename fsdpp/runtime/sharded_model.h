#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdpp/comm/peer_group.h"
#include "fsdpp/device/device.h"
#include "fsdpp/device/ledger.h"
#include "fsdpp/runtime/options.h"
#include "fsdpp/runtime/parameter_group.h"
#include "fsdpp/runtime/pass.h"

namespace fsdpp::runtime {

class BackwardPass;
class Core;

/// A unit as reports show it.
struct UnitReport {
  std::string name;
  int64_t parameters = 0;  // elements, tied ones once
  int64_t bytes = 0;       // of the full model weights, padding included
  int64_t padding_bytes = 0;
};

/// What happened beside the plan, and how much.
struct Counters {
  int64_t gathers = 0;            // unit gathers
  int64_t publications = 0;       // epochs of weights
  int64_t departures = 0;         // arrivals at another unit than the recorded order said
  int64_t on_demand_gathers = 0;  // by fused backwards that found their unit released
  int64_t weight_overflows = 0;   // units that did not fit their planned place
  int64_t spills = 0;             // gradients that had to leave their planned slot
};

/// A list of modules that is gathered and reduced as one.
struct UnitSpec {
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  /// Other than whole: the unit's one parameter [rows, dim] is an embedding table that may be exchanged by
  /// rows (Options::row_exchange_bytes). Under `rows` its module need not be entered, and nothing may read
  /// the weight but lookups; under `rows_and_whole` what else reads it enters the unit.
  Use use = Use::whole;
  UnitChoice choice = {};
};

/// While it lives, backwards are (or are not) the window's last: where gradients are not sharded (no_shard,
/// optim) only the last is reduced, and on a hybrid mesh only the last is summed over the replicas. A scope
/// inside another counts in its place.
class MicrobatchScope {
 public:
  MicrobatchScope(std::shared_ptr<Core> core, bool last);
  ~MicrobatchScope();
  MicrobatchScope(const MicrobatchScope&) = delete;
  MicrobatchScope& operator=(const MicrobatchScope&) = delete;

 private:
  std::shared_ptr<Core> core_;
  bool last_around_;  // what was declared before it
  bool around_;       // something was
};

/// A torch::nn module whose parameters live in shards over the ranks of a group.
///
/// Made by fully_shard(). The modules stay the user's own: units are entered through fsdpp::call or
/// fsdpp::Unit, backward() is autograd's, and optimizers get shards(). One object per rank, used by the
/// rank's thread.
class ShardedModel : public std::enable_shared_from_this<ShardedModel> {
 public:
  explicit ShardedModel(std::shared_ptr<Core> core);
  ~ShardedModel();
  ShardedModel(const ShardedModel&) = delete;
  ShardedModel& operator=(const ShardedModel&) = delete;

  /// This rank's main weights, one leaf per distinct parameter, in registration order: 1-d pieces
  /// (possibly empty), whole parameters under no_shard. Their grad() is the reduced gradient.
  ///
  /// A post-accumulate hook of one (torch::autograd::impl::set_post_acc_grad_hooks) sees that gradient: once
  /// per window, when all are complete and readable on the compute lane, as the last thing in the window's
  /// last backward, in backward_dw() or in finish_reduces(). Hooks run in this order, without grad mode, on
  /// every rank, and for empty pieces too; for a backward that is given up none does. A hook may step its
  /// shard (a change of weights as any other: see weights_changed()), clear its gradient, or throw: that
  /// leaves the call, hooks after it are left out, and gradients are whole. Other kinds of hooks of shards
  /// never run. A hook of a full parameter sees another gradient: this rank's of one backward, whole and not
  /// reduced; it keeps fused layers from writing that.
  [[nodiscard]] std::vector<at::Tensor> shards() const;
  /// Names and sizes of the parameters behind shards(), in the same order.
  [[nodiscard]] std::vector<std::pair<std::string, std::vector<int64_t>>> parameters() const;

  /// Throws UsageError, naming a parameter, when shards() show gradients that are this rank's part of a sum:
  /// the window's last backward has not run. `what`: who cannot go on, for the message.
  void require_complete_gradients(const char* what) const;

  /// The gradients that shards() have, of those elements that this rank counts in sums over counted().
  [[nodiscard]] std::vector<at::Tensor> counted_gradients() const;

  /// Clears the gradients of all shards, as torch::optim::Optimizer::zero_grad does, and drops what waits in
  /// slots to be reduced by hand. What backward_dw() has still to compute stays: it is no gradient yet. After
  /// a backward that raised it gives that up first, for which it waits for the peers to do so (here or in
  /// their next forward).
  void zero_grad(bool set_to_none = true);

  /// Says that main weights were written (an optimizer step, a checkpoint): the next forward publishes them.
  void weights_changed();
  /// Promises that every change of main weights will be told with weights_changed(), on all ranks, as
  /// optimizers of ours do; who swaps other weights in, for an evaluation say, then tells that too. Without
  /// the promise they are presumed changed at every root forward outside a declared window, since a fused
  /// optimizer or a `.data` write leaves no trace.
  void promise_to_tell();

  /// Declares backwards to be the window's last or not; `auto scope = model.microbatch(i + 1 == count);`.
  [[nodiscard]] MicrobatchScope microbatch(bool last) const;

  /// With Options::delay_wgrad: computes the weight gradients of the backwards before, of all units or of the
  /// one that `unit` enters, and reduces; in any order of units, equal on all ranks. Gradients are readable
  /// when all are done. Several backwards before it are reduced once, as their sum. Throws UsageError inside
  /// a backward, and for a module that is no unit of this model.
  void backward_dw();
  void backward_dw(const torch::nn::Module& unit);

  // Schedules of the user's own, as pipelines have them.
  /// Takes a hold of `unit` (gathers it now), or lets all such holds go. Throws UsageError for a module that
  /// is no unit of this model.
  void gather(const torch::nn::Module& unit);
  void release(const torch::nn::Module& unit);
  /// From now on backwards reduce nothing (`by_hand`): their gradients add up in the slots until reduce() of
  /// the unit or finish_reduces(), which every rank calls in the same order; a slot can also be taken outside
  /// a backward (SinkOwner::open). A full weight's `.grad` is free in the meantime: what is found there goes
  /// into the slot. Throws UsageError while gradients wait to be reduced.
  void reduce_by_hand(bool by_hand);
  /// The gradients of `unit` are complete: it is reduced when those before it in the order of reduces are.
  void reduce(const torch::nn::Module& unit);
  /// Reduces all units that have not been, and ends the round: gradients are readable.
  void finish_reduces();

  /// Keeps all units gathered, or lets them go again (a user's hold): for reading full weights in place.
  void hold_all();
  void release_all();

  [[nodiscard]] std::vector<UnitReport> units() const;
  [[nodiscard]] Counters counters() const;
  /// Memory of the runtime on this rank, by purpose.
  [[nodiscard]] const device::Ledger& memory() const;
  [[nodiscard]] const Options& options() const;
  [[nodiscard]] comm::PeerGroup& group() const;
  /// The ranks whose shards() together are the model, each element once: all of group(), or on a hybrid mesh
  /// whose replicas all have the whole optimizer state, those along "shard". What units under no_shard have
  /// each rank has whole. Of experts: those of the same experts.
  [[nodiscard]] comm::PeerGroup& owners() const;
  /// The ranks whose shards() together are every element of the model once, other ranks' experts (a mesh's
  /// axis "expert") included: what is summed over shards, a norm say, is summed over these. Beside other
  /// strategies each of them has what units under no_shard have: counted_gradients() leaves out what is not
  /// this rank's to count. Null: this rank has all by itself.
  [[nodiscard]] comm::PeerGroup* counted() const;
  [[nodiscard]] device::Device& device() const;
  /// True when no unit is gathered (always under no_shard).
  [[nodiscard]] bool at_rest() const;
  /// Planned bytes of full weights and of gradient slots, and how they are laid out, as text for people.
  [[nodiscard]] std::string memory_plan() const;

  /// Collective: whole copies of all parameters in model dtype, as the next forward would see them.
  [[nodiscard]] std::vector<at::Tensor> full_weights();
  /// Collective: whole fp32 copies of all gradients; undefined where any rank's shard has none.
  [[nodiscard]] std::vector<at::Tensor> full_gradients();
  /// Collective: sets main weights from whole tensors (any float dtype), one per parameter, equal on all
  /// ranks. Throws UsageError that names the parameter when sizes differ.
  void load_weights(const std::vector<at::Tensor>& weights);

  /// One entry of shards() as an optimizer's kernel sees it: `count` neighbouring weights.
  struct ShardRun {
    at::Tensor shard;        // the leaf, with its gradient
    float* main;             // main weights; null unless they are fp32
    void* model;             // where their published form goes, or null: it is the main weights themselves
    at::ScalarType dtype{};  // of `model`
    int64_t count;           // elements; 0: nothing of it lies on this rank
    bool counted;            // among counted(), this rank counts it
  };
  [[nodiscard]] std::vector<ShardRun> shard_runs() const;
  /// Main weights and gradients of all that is trained are fp32.
  [[nodiscard]] bool all_fp32() const;
  /// Collective: runs `update`, which updates main weights and writes their published form on the compute
  /// lane, when no peer reads the old one any more, and publishes the new one: the next forward casts
  /// nothing.
  void update_and_publish(const std::function<void()>& update);
  /// Collective: `all` [counted()->ranks()] gets the number that each rank of counted() has at `own`, in rank
  /// order; in the lanes' memory, on the compute lane.
  void exchange_scalars(const double* own, double* all);
  [[nodiscard]] const std::shared_ptr<device::Ledger>& ledger() const;

  // For fsdpp::call. One forward through a unit: enter, the module's own forward, leave for each tensor,
  // finish.
  [[nodiscard]] std::shared_ptr<Pass> enter(int unit);
  void leave(const std::shared_ptr<Pass>& pass, at::Tensor& output);
  void finish(const std::shared_ptr<Pass>& pass, bool raised);

 private:
  [[nodiscard]] int unit_of(const torch::nn::Module& unit, const char* what) const;
  std::shared_ptr<Core> core_;
};

}  // namespace fsdpp::runtime
