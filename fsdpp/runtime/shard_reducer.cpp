#include <ATen/ops/empty.h>

#include <algorithm>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/runtime/late_rows.h"
#include "fsdpp/runtime/reducer.h"
#include "fsdpp/runtime/replica_gradients.h"
#include "fsdpp/runtime/rounded_sums.h"
#include "fsdpp/runtime/row_exchange.h"
#include "fsdpp/runtime/spilled_slot.h"

namespace fsdpp::runtime {
namespace {

using device::LaneKind;

class ShardReducer final : public Reducer {
 public:
  ShardReducer(Peers& peers, SlotMemory& slots, ReplicaGradients* replicas, RoundedSums& rounded, float scale,
               const Options& options, std::shared_ptr<device::Ledger> ledger)
      : peers_(peers),
        slots_(slots),
        replicas_(replicas),
        rounded_(rounded),
        scale_(scale),
        late_(peers, scale, options.late_group_elements),
        keep_addresses_(options.keep_gradient_addresses),
        ledger_(std::move(ledger)),
        states_(static_cast<std::size_t>(slots.slots())) {}

  ~ShardReducer() override {
    for (const auto& [group, bytes] : held_) ledger_->remove(kPurpose, bytes);
  }

  GradSink open(Parameter& parameter) override {
    if (!parameter.late.empty()) bring_back(parameter);
    return slot_sink(parameter);
  }

  void contribute(Parameter& parameter, const RowWriter& write) override;

  void begin(bool last) override {
    last_ = last;
    unsummed_.clear();
    uses_.clear();
  }

  // libtorch's allocator on a GPU gives the memory to the next forward's activations; on the host it would go
  // back to the system, page by page.
  void cleared() override {
    if (peers_.device().gpu() < 0 || keep_addresses_) return;
    // After a backward that raised, a reduce may still be writing what is given back here.
    peers_.device().wait(LaneKind::compute, peers_.device().record(LaneKind::reduce));
    for (const auto& [group, bytes] : held_) {
      group->gradient.reset();
      ledger_->remove(kPurpose, bytes);
    }
    held_.clear();
  }

  void forget() override;
  void check(ParameterGroup& group) override {
    if (replicas_ != nullptr) replicas_->check(group);
  }
  [[nodiscard]] const Parameter* partial() const override {
    return replicas_ != nullptr ? replicas_->partial() : nullptr;
  }

  void reduce(ParameterGroup& group) override;

  void finish() override {
    peers_.device().wait(LaneKind::compute, peers_.device().record(LaneKind::reduce));
    late_.run();
    if (replicas_ == nullptr) return;
    sum_replicas(0);
    replicas_->finish();
  }

  [[nodiscard]] std::span<const SlotUse> uses() const noexcept override { return uses_; }
  [[nodiscard]] int64_t spills() const noexcept override { return spills_; }

 private:
  static constexpr const char* kPurpose = "gradient shards";

  struct State {
    bool open = false;          // holds contributions of this backward
    SpilledSlot spill;          // not empty: they are here instead of in the slot
    int first = -1;             // reduces before the first contribution, late ones included; -1: none came
    uint32_t sequence = 0;      // of the last reduce
    device::Event pulled;       // on the reduce lane: our own pull of it
    bool pulls_awaited = true;  // the compute lane goes on after everybody's pull of it
  };

  State& state(int slot) { return states_[static_cast<std::size_t>(slot)]; }
  std::byte* place(int slot) {
    return state(slot).spill.empty() ? slots_.data(slot) : state(slot).spill.data();
  }

  GradSink slot_sink(const Parameter& parameter);
  // The ranks compare these numbers: they must not depend on which rows a rank owns.
  void note_first(int slot) {
    if (state(slot).first < 0) state(slot).first = static_cast<int>(uses_.size());
  }
  void bring_back(Parameter& parameter);
  void open_slot(int slot);
  void claim(int slot);
  void spill(int slot);
  void move_into_slot(int slot);
  [[nodiscard]] bool bytes_in_use(int slot);
  void reduce_whole(ParameterGroup& group, std::span<const buffer::ReduceTarget> outputs);
  std::vector<buffer::ReduceTarget> targets(ParameterGroup& group);
  std::vector<buffer::ReduceTarget> own_targets(ParameterGroup& group);
  void renew_gradient(ParameterGroup& group);
  void sum_replicas(std::size_t but);

  Peers& peers_;
  SlotMemory& slots_;
  ReplicaGradients* replicas_;
  RoundedSums& rounded_;
  std::deque<ParameterGroup*> unsummed_;  // over the replicas: the newest one's late rows come
  bool last_ = true;                      // of its window, this backward is
  float scale_;
  LateRows late_;
  bool keep_addresses_;  // of gradient shards, over steps
  std::shared_ptr<device::Ledger> ledger_;
  std::vector<State> states_;
  std::vector<SlotUse> uses_;
  int64_t spills_ = 0;
  std::map<ParameterGroup*, int64_t> held_;  // bytes of gradient shards in the ledger
};

// Another open slot lies on the same bytes.
bool ShardReducer::bytes_in_use(int slot) {
  for (int other = 0; other < slots_.slots(); ++other) {
    if (other != slot && state(other).open && state(other).spill.empty() &&
        slots_.plan().share_bytes(slot, other)) {
      return true;
    }
  }
  return false;
}

void ShardReducer::forget() {
  if (replicas_ != nullptr) replicas_->forget();
  late_.drop_stale();
  for (int slot = 0; slot < slots_.slots(); ++slot) {
    if (state(slot).open) slots_.move(slot, device::State::closed);
    state(slot).open = false;
    state(slot).first = -1;
    state(slot).spill.drop(peers_.device(), slots_.group(slot));
    for (const auto& parameter : slots_.group(slot).parameters) {
      parameter->contributed = false;
      parameter->late.clear();
    }
  }
}

GradSink ShardReducer::slot_sink(const Parameter& parameter) {
  const int slot = slots_.slot_of(*parameter.group);
  note_first(slot);
  if (!state(slot).open) open_slot(slot);
  return {gradient_view(nullptr, place(slot), parameter),
          parameter.contributed ? GradSink::Mode::add : GradSink::Mode::overwrite};
}

// The rows of the peers go to the slot at once: they wait for them.
void ShardReducer::contribute(Parameter& parameter, const RowWriter& write) {
  const bool whole = parameter.contributed && parameter.late.empty();  // the slot has all rows already
  const Rows late = whole ? Rows{} : late_.of(parameter);
  const int64_t rows = parameter.sizes[0];
  if (late.empty()) {
    write_rows(peers_.device(), parameter, slot_sink(parameter), {0, rows}, write);
    parameter.contributed = true;
    return;
  }
  parameter.late.push_back(write);
  note_first(slots_.slot_of(*parameter.group));
  if (late.first == 0 && late.last == rows) return;
  const GradSink sink = slot_sink(parameter);
  write_rows(peers_.device(), parameter, sink, {0, late.first}, write);
  write_rows(peers_.device(), parameter, sink, {late.last, rows}, write);
  parameter.contributed = true;
}

// A contribution comes that has to be written as a whole: late rows go to the slot after all.
void ShardReducer::bring_back(Parameter& parameter) {
  const Rows late = late_.of(parameter);
  GradSink sink = slot_sink(parameter);
  sink.mode = GradSink::Mode::overwrite;
  for (const RowWriter& write : std::exchange(parameter.late, {})) {
    write_rows(peers_.device(), parameter, sink, late, write);
    sink.mode = GradSink::Mode::add;
  }
  parameter.contributed = true;
}

void ShardReducer::open_slot(int slot) {
  const bool beside = bytes_in_use(slot);
  if (beside) {
    state(slot).spill.take(peers_.device(), slots_.group(slot), ledger_);
    ++spills_;
  }
  state(slot).open = true;
  slots_.move(slot, device::State::open);
  if (!beside) claim(slot);
}

// The bytes are ours to write once every peer has pulled what last lay there.
void ShardReducer::claim(int slot) {
  for (int other = 0; other < slots_.slots(); ++other) {
    const bool same_bytes = other == slot || slots_.plan().share_bytes(slot, other);
    if (!same_bytes || state(other).pulls_awaited) continue;
    state(other).pulls_awaited = true;  // the lane is in order: once is enough
    const ParameterGroup& group = slots_.group(other);
    peers_.device().wait(LaneKind::compute, state(other).pulled);  // not the reduce just launched
    peers_.wait_all(LaneKind::compute, "pulled " + group.name, Channel::pulled(group.id),
                    state(other).sequence);
  }
  slots_.begin_life(slot);
}

// Moves what `slot` holds to ordinary memory.
void ShardReducer::spill(int slot) {
  const ParameterGroup& group = slots_.group(slot);
  state(slot).spill.take(peers_.device(), group, ledger_);
  ++spills_;
  peers_.device().copy(LaneKind::compute, "spill " + group.name, state(slot).spill.data(), slots_.data(slot),
                       static_cast<std::size_t>(group.slot_bytes()));
}

// Its turn to be reduced: the others on its bytes make room.
void ShardReducer::move_into_slot(int slot) {
  for (int other = 0; other < slots_.slots(); ++other) {
    const bool in_place = state(other).open && state(other).spill.empty();
    if (other != slot && in_place && slots_.plan().share_bytes(slot, other)) spill(other);
  }
  claim(slot);
  const ParameterGroup& group = slots_.group(slot);
  peers_.device().copy(LaneKind::compute, "unspill " + group.name, slots_.data(slot),
                       state(slot).spill.data(), static_cast<std::size_t>(group.slot_bytes()));
  state(slot).spill.drop(peers_.device(), group);
}

void ShardReducer::reduce(ParameterGroup& group) {
  std::vector<buffer::ReduceTarget> outputs = targets(group);  // made in the order of the compute lane
  if (group.rounds_sums()) {
    reduce_whole(group, rounded_.targets(group));
    rounded_.store(group, outputs);
  } else if (group.is_gathered()) {
    reduce_whole(group, outputs);
  }
  if (group.rows != nullptr) {
    const bool empty = outputs.empty();  // no element of it lies on this rank
    const bool add = group.is_gathered() || (!empty && outputs.front().add);
    group.rows->reduce(empty ? nullptr : static_cast<float*>(outputs.front().out), scale_, add);
  }
  for (const auto& parameter : group.parameters) parameter->contributed = false;
  late_.due(group, outputs, peers_.device().record(LaneKind::reduce));
  if (replicas_ != nullptr && last_) unsummed_.push_back(&group);
  late_.run(&group);
  sum_replicas(1);
}

// Of the groups reduced so far but the newest `but`: all late rows of the others have been launched.
void ShardReducer::sum_replicas(std::size_t but) {
  while (unsummed_.size() > but) {
    ParameterGroup* group = unsummed_.front();
    unsummed_.pop_front();
    replicas_->reduce(*group);
  }
}

void ShardReducer::reduce_whole(ParameterGroup& group, std::span<const buffer::ReduceTarget> outputs) {
  const int slot = slots_.slot_of(group);
  State& current = state(slot);
  const bool contributes = current.open;
  if (!contributes && !peers_.tells_contributions()) open_slot(slot);  // its zeros say so
  if (current.open) {
    zero_missing(peers_.device(), group, place(slot));
    if (!current.spill.empty()) move_into_slot(slot);  // waits for pulls of the reduce before this one
  }
  slots_.move(slot, device::State::reducing);
  const uint32_t sequence = ++current.sequence;
  peers_.set_contributed(group.id, sequence, contributes);
  peers_.device().wait(LaneKind::reduce, peers_.device().record(LaneKind::compute));
  peers_.signal(LaneKind::reduce, "ready " + group.name, Channel::ready(group.id), sequence);
  peers_.wait_all(LaneKind::reduce, "ready " + group.name, Channel::ready(group.id), sequence);
  buffer::reduce(peers_.route(LaneKind::reduce), slots_.buffer(slot, layout::Placement::partial), outputs,
                 peers_.contributors(group.id, sequence), scale_);
  peers_.signal(LaneKind::reduce, "pulled " + group.name, Channel::pulled(group.id), sequence);
  current.pulled = peers_.device().record(LaneKind::reduce);
  current.pulls_awaited = false;
  note_first(slot);
  uses_.push_back({slot, std::exchange(current.first, -1)});
  current.open = false;
  slots_.move(slot, device::State::closed);
}

// Fresh memory for the gradient shard, unless nobody but us and the shards' gradients holds the old one.
void ShardReducer::renew_gradient(ParameterGroup& group) {
  if (group.gradient.defined()) {
    std::size_t ours = 1;
    for (const auto& parameter : group.parameters) {
      const at::Tensor& gradient = parameter->shard.grad();
      if (gradient.defined() && gradient.is_alias_of(group.gradient)) ++ours;
    }
    if (keep_addresses_ || group.gradient.storage().use_count() == ours) return;
  }
  if (held_.count(&group) == 0) {
    // On a GPU it is libtorch's memory, in turn with activations: counted with those, not by us.
    const auto element = static_cast<int64_t>(c10::elementSize(group.gradient_dtype));
    const int64_t bytes = peers_.device().gpu() < 0 ? group.layout->shard_numel() * element : 0;
    ledger_->add(kPurpose, bytes);
    held_[&group] = bytes;
  }
  group.gradient =
      at::empty({group.layout->shard_numel()}, at::TensorOptions(group.place).dtype(group.gradient_dtype));
}

// Not a view in autograd's eyes: torch's optimizers detach_() gradients, which views refuse.
at::Tensor piece_of(const at::Tensor& whole, int64_t offset, int64_t count) {
  at::Tensor piece = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(whole.storage()), whole.key_set() - c10::autograd_dispatch_keyset, whole.dtype());
  piece.unsafeGetTensorImpl()->set_sizes_contiguous({count});
  piece.unsafeGetTensorImpl()->set_storage_offset(offset);
  return piece;
}

std::vector<buffer::ReduceTarget> ShardReducer::targets(ParameterGroup& group) {
  if (replicas_ == nullptr) return own_targets(group);
  std::vector<buffer::ReduceTarget> result;
  for (const buffer::ReduceTarget& target : replicas_->targets(group, peers_.rank())) {
    late_.cut(target, *group.parameters[static_cast<std::size_t>(target.segment.parameter)], result);
  }
  return result;
}

// As `.grad` always did: stored where there is none, else added.
std::vector<buffer::ReduceTarget> ShardReducer::own_targets(ParameterGroup& group) {
  const at::NoGradGuard no_grad;
  renew_gradient(group);
  std::vector<buffer::ReduceTarget> result;
  for (const layout::Segment& segment : group.layout->segments(peers_.rank())) {
    Parameter& parameter = *group.parameters[static_cast<std::size_t>(segment.parameter)];
    at::Tensor& gradient = parameter.shard.mutable_grad();
    const bool add = gradient.defined();
    if (!add) gradient = piece_of(group.gradient, segment.shard_offset, segment.count);
    require(gradient.scalar_type() == group.gradient_dtype && gradient.is_contiguous() &&
                gradient.numel() == segment.count,
            "the gradient of ", parameter.name, "'s shard was replaced by one of ", gradient.numel(),
            " elements of type ", gradient.dtype().name(), "; expected ", segment.count,
            " contiguous elements of type ", c10::toString(group.gradient_dtype),
            ": clear it with zero_grad()");
    late_.cut({segment, gradient.data_ptr(), add}, parameter, result);
  }
  for (const auto& parameter : group.parameters) {
    at::Tensor& gradient = parameter->shard.mutable_grad();
    if (!gradient.defined())
      gradient = at::empty({0}, group.gradient.options());  // no element of it lies on this rank
  }
  return result;
}

}  // namespace

std::unique_ptr<Reducer> make_shard_reducer(Peers& peers, SlotMemory& slots, ReplicaGradients* replicas,
                                            RoundedSums& rounded, float scale, const Options& options,
                                            std::shared_ptr<device::Ledger> ledger) {
  return std::make_unique<ShardReducer>(peers, slots, replicas, rounded, scale, options, std::move(ledger));
}

}  // namespace fsdpp::runtime
