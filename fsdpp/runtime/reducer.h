#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "fsdpp/runtime/options.h"
#include "fsdpp/runtime/plan.h"
#include "fsdpp/runtime/sink.h"
#include "fsdpp/runtime/slot_memory.h"

namespace fsdpp::runtime {

class ReplicaGradients;
class RoundedSums;

/// What a strategy does with gradients: where contributions go, and how they become the shards' gradients.
///
/// Reduces are not one-sided: every rank calls reduce() for the same groups in the same order, also for a
/// group without contributions.
class Reducer {
 public:
  virtual ~Reducer() = default;

  /// Where the next contribution to `parameter` goes.
  virtual GradSink open(Parameter& parameter) = 0;
  /// Has `write` write all rows of a contribution to `parameter`, now or (some) later in this backward.
  virtual void contribute(Parameter& parameter, const RowWriter& write) = 0;
  /// A backward begins; `last`: it is its window's last.
  virtual void begin(bool last) = 0;
  /// The shards' gradients were cleared by set_to_none: memory that only they needed may go.
  virtual void cleared() {}
  /// A backward raised half-way: contributions that were not reduced and that no gradient shows are dropped.
  virtual void forget() = 0;
  /// Throws what reduce() of `group` would refuse, before anything of it is done.
  virtual void check(ParameterGroup& group) { static_cast<void>(group); }
  /// A parameter whose gradient shows a sum that is not complete: over this rank's backwards of a window, not
  /// yet over the ranks. Null: there is none.
  [[nodiscard]] virtual const Parameter* partial() const { return nullptr; }
  /// Takes part in the reduce of `group`, whose contributions on this rank are complete.
  virtual void reduce(ParameterGroup& group) = 0;
  /// All groups of this backward have been reduced: gradients are readable when it returns.
  virtual void finish() = 0;
  /// How slots that each backward reduces were used in the last one, in the order of reduces.
  [[nodiscard]] virtual std::span<const SlotUse> uses() const noexcept = 0;
  /// Gradients that had to leave their planned slot because the step departed from the plan.
  [[nodiscard]] virtual int64_t spills() const noexcept = 0;
};

/// Where gradients are sharded: contributions to planned slots; each backward ends with reduces into gradient
/// shards. On a hybrid mesh these are `replicas` (else null), whose sum ends the window's last backward.
[[nodiscard]] std::unique_ptr<Reducer> make_shard_reducer(Peers& peers, SlotMemory& slots,
                                                          ReplicaGradients* replicas, RoundedSums& rounded,
                                                          float scale, const Options& options,
                                                          std::shared_ptr<device::Ledger> ledger);

/// Where they are not: slots are the window's accumulators, and its last backward ends with a reduce in
/// place, or (hybrid) into `replicas`. `whole`: with an all-reduce, and slots are the shards' gradients
/// (no_shard); else those are this rank's parts of the slots (optim).
[[nodiscard]] std::unique_ptr<Reducer> make_window_reducer(Peers& peers, SlotMemory& slots,
                                                           ReplicaGradients* replicas, RoundedSums& rounded,
                                                           float scale, bool whole);

/// For units with several strategies: `of` each has what reduces its groups; some may share one.
[[nodiscard]] std::unique_ptr<Reducer> make_strategy_reducer(std::map<Strategy, std::shared_ptr<Reducer>> of);

/// Says that the compute lane writes `sink`, or adds to it.
void announce_write(device::Device& device, const Parameter& parameter, const GradSink& sink);
/// One operation of the compute lane: `write` writes `rows` into `sink`, whose view has these rows only, or
/// (no rows) the whole.
void run_writer(device::Device& device, const std::string& name, const GradSink& sink, Rows rows,
                const RowWriter& write);
/// The same into a `sink` that has all rows of `parameter`.
void write_rows(device::Device& device, const Parameter& parameter, const GradSink& sink, Rows rows,
                const RowWriter& write);

}  // namespace fsdpp::runtime
