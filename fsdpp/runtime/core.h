#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/runtime/backward_pass.h"
#include "fsdpp/runtime/inner_shards.h"
#include "fsdpp/runtime/pass.h"
#include "fsdpp/runtime/rank_groups.h"
#include "fsdpp/runtime/replica_gradients.h"
#include "fsdpp/runtime/rounded_sums.h"
#include "fsdpp/runtime/row_exchange.h"
#include "fsdpp/runtime/sharded_model.h"

namespace fsdpp::runtime {

/// A unit as the runtime holds it.
struct UnitState {
  std::string name;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;  // entering any of them enters the unit
  std::vector<std::unique_ptr<ParameterGroup>> groups;
  Use use = Use::whole;
  Options options;  // with its own choice
  PassTable passes;
};

/// Everything behind a ShardedModel: the units and the machinery over them, wired together. Units come in
/// registration order, the root first.
class Core {
 public:
  /// Collective. Takes over the parameters of `units`, whose groups have names, dtypes, parameters and
  /// layouts.
  Core(RankGroups ranks, std::shared_ptr<torch::nn::Module> root, std::vector<UnitState> units,
       Options options, std::unique_ptr<device::Device> device);
  ~Core();

  // forward
  std::shared_ptr<Pass> enter(int unit);
  /// `output` is one that the module returns: gets the unit's output dtype.
  void leave(const std::shared_ptr<Pass>& pass, at::Tensor& output);
  void finish(const std::shared_ptr<Pass>& pass, bool raised);

  // windows and weights
  void zero_grad(bool set_to_none);
  void weights_changed();
  /// Collective: publishes main weights if they may have changed since the last time.
  void refresh();
  /// Collective: `update` writes main weights and their published form, on the compute lane.
  void publish_by(const std::function<void()>& update);
  /// All ranks.
  [[nodiscard]] Peers& everyone() const { return whole ? *whole : *peers; }
  /// Those whose shards of main weights together are the model, each element once: all ranks, or (each
  /// replica has them all) those that shard.
  [[nodiscard]] Peers& owners() const {
    return whole && options.shard_optimizer_over_replicas ? *whole : *peers;
  }
  /// Which part of ParameterGroup::main_layout rank `owner` of owners() has.
  [[nodiscard]] int part_of_owner(int owner) const {
    if (&owners() == peers.get()) return owner;
    return owner % peers->ranks() * replicas->ranks() + owner / peers->ranks();
  }
  /// Those over which numbers made of main weights or gradients (a norm) are summed so that each element
  /// counts once, other ranks' experts included; null: this rank has all of them. Of what several of them
  /// have as a whole (no_shard beside other strategies) only the one for which counts_here() is true counts
  /// it.
  [[nodiscard]] Peers* counted() const;
  [[nodiscard]] bool counts_here(const ParameterGroup& group) const;
  /// Any of the groups shards its optimizer state.
  [[nodiscard]] bool shards_any() const;
  void hold_all(bool held);

  // Members in order of construction; each may use those above it.
  RankGroups ranks;
  std::shared_ptr<torch::nn::Module> root;
  std::vector<UnitState> units;
  Options options;
  std::shared_ptr<device::Ledger> ledger;
  std::unique_ptr<device::Device> device;
  std::vector<ParameterGroup*> groups;                 // all, by id
  std::vector<std::shared_ptr<Parameter>> parameters;  // in registration order
  std::unique_ptr<Peers> peers;                        // those that shard
  std::unique_ptr<Peers> replicas;                     // hybrid: those with the same shards
  std::unique_ptr<Peers> whole;                        // hybrid: all
  std::unique_ptr<Peers> others;                       // experts: all, or (no_shard) one of each
  std::unique_ptr<Publisher> publisher;
  std::map<int, std::unique_ptr<InnerShards>> inner_shards;  // by their size
  std::vector<std::unique_ptr<RowExchange>> row_exchanges;
  std::unique_ptr<SlotMemory> slots;         // of groups that every backward reduces
  std::unique_ptr<SlotMemory> window_slots;  // of the others: windows' accumulators
  std::unique_ptr<RoundedSums> rounded;
  std::unique_ptr<ReplicaGradients> replica_gradients;  // hybrid
  std::unique_ptr<Reducer> reducer;
  std::unique_ptr<HostGradients> host_gradients;  // with offload
  std::unique_ptr<Residency> residency;
  Order forward_order;  // with gradient
  Order backward_order;
  Order evaluation_order;  // without
  std::shared_ptr<BackwardPass> backward;

  bool promised = false;  // weights_changed() will be called: no need to presume
  bool in_scope = false;  // inside a declared microbatch

 private:
  /// A backward as the ranks compare it.
  struct Seen {
    std::vector<ParameterGroup*> completed;
    std::vector<SlotUse> uses;
    uint64_t hash = 0;  // 0: none was seen
  };

  void begin_forward();
  void publish(const std::function<void()>& update = nullptr);
  void end_forward(bool raised);
  void check_parameters(const UnitState& unit) const;
  void make_peers();
  void make_inner_shards();
  void make_gradients();
  void broadcast_from_first(Peers& among, ParameterGroup& held);
  void broadcast_by_sum(Peers& among, ParameterGroup& held);
  [[nodiscard]] bool must_publish() const;
  void settle_window();
  [[nodiscard]] std::vector<ParameterGroup*> choose_kept() const;
  [[nodiscard]] std::vector<Sized> unit_sizes() const;
  [[nodiscard]] layout::ArenaPlan weight_plan() const;
  [[nodiscard]] std::unique_ptr<SlotMemory> make_slots(const std::vector<ParameterGroup*>& of, bool windows);
  [[nodiscard]] std::unique_ptr<Reducer> make_reducer();
  [[nodiscard]] Seen last_backward() const;
  void adopt(const Seen& seen);
  void settle();
  /// Of the root's pass under way: recompute runs units inside it without gradients that come back all the
  /// same.
  Order& current_order() { return root_with_gradient_ ? forward_order : evaluation_order; }

  std::vector<int> entered_;  // units of nested forwards, the outermost first
  bool root_pass_ = false;    // the outermost one is the root's
  bool root_with_gradient_ = false;
  bool window_open_ = false;     // weights are as published until it closes
  bool orders_changed_ = false;  // a pass differed from what was planned
  bool backward_seen_ = false;   // one ran to its end since the last publication
  Seen told_;                    // to the peers, at the last publication
  bool autocast_cache_ = false;  // to restore
};

}  // namespace fsdpp::runtime
