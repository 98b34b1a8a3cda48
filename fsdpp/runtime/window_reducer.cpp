#include <ATen/ops/empty.h>

#include <utility>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/runtime/partial_gradients.h"
#include "fsdpp/runtime/reducer.h"
#include "fsdpp/runtime/replica_gradients.h"
#include "fsdpp/runtime/rounded_sums.h"

namespace fsdpp::runtime {
namespace {

using device::LaneKind;

class WindowReducer final : public Reducer {
 public:
  WindowReducer(Peers& peers, SlotMemory& slots, ReplicaGradients* replicas, RoundedSums& rounded,
                float scale, bool whole)
      : peers_(peers),
        slots_(slots),
        replicas_(replicas),
        rounded_(rounded),
        scale_(scale),
        whole_(whole),
        partial_(whole),
        states_(static_cast<std::size_t>(slots.slots())) {}

  GradSink open(Parameter& parameter) override;
  void contribute(Parameter& parameter, const RowWriter& write) override {
    write_rows(peers_.device(), parameter, open(parameter), {0, parameter.sizes[0]}, write);
    parameter.contributed = true;
  }

  void begin(bool /*last*/) override { reduced_.clear(); }
  void forget() override;
  void check(ParameterGroup& group) override {
    for (const auto& parameter : group.parameters) static_cast<void>(partial_.holds(*parameter));
  }
  [[nodiscard]] const Parameter* partial() const override { return partial_.any(); }

  void reduce(ParameterGroup& group) override;
  void finish() override;

  [[nodiscard]] std::span<const SlotUse> uses() const noexcept override { return {}; }
  [[nodiscard]] int64_t spills() const noexcept override { return 0; }

 private:
  struct State {
    bool open = false;
    uint32_t sequence = 0;      // of the last reduce
    bool pulls_awaited = true;  // the compute lane goes on after everybody's pull of it
  };

  State& state(int slot) { return states_[static_cast<std::size_t>(slot)]; }
  void open_slot(int slot);
  void await_pulls(int slot);
  [[nodiscard]] at::Tensor shown(int slot, const Parameter& parameter) const;
  [[nodiscard]] std::byte* own_region(int slot) const;
  std::vector<buffer::ReduceTarget> targets(int slot);
  void sum(int slot, const std::vector<int>& contributors);
  void sum_replicas(int slot);
  void gather_regions();

  Peers& peers_;
  SlotMemory& slots_;
  ReplicaGradients* replicas_;
  RoundedSums& rounded_;
  float scale_;
  bool whole_;
  PartialGradients partial_;
  std::vector<State> states_;
  std::vector<int> reduced_;  // slots, in order
};

// Peers have read what the slot held, and gradients of the last window that lie in it move out: it may be
// written.
void WindowReducer::open_slot(int slot) {
  State& opened = state(slot);
  opened.open = true;
  slots_.move(slot, device::State::open);
  await_pulls(slot);
  for (const auto& parameter : slots_.group(slot).parameters) {
    parameter->contributed = false;
    partial_.move_out(*parameter);
  }
  slots_.begin_life(slot);
}

// What was accumulated shows in the gradients and stays, but for what raised before it was written.
void WindowReducer::forget() {
  for (int slot = 0; slot < slots_.slots(); ++slot) {
    for (const auto& parameter : slots_.group(slot).parameters) {
      partial_.drop_refused(*parameter);
      if (state(slot).open && !parameter->contributed) partial_.take_back(*parameter);
    }
  }
}

void WindowReducer::await_pulls(int slot) {
  State& current = state(slot);
  if (std::exchange(current.pulls_awaited, true)) return;
  const ParameterGroup& group = slots_.group(slot);
  peers_.wait_all(LaneKind::compute, "pulled " + group.name, Channel::pulled(group.id), current.sequence);
}

std::byte* WindowReducer::own_region(int slot) const {
  return slots_.data(slot) + peers_.rank() * slots_.group(slot).slot_bytes() / peers_.ranks();
}

// What `.grad` of the parameter's shard is while its gradient lies in the slot.
at::Tensor WindowReducer::shown(int slot, const Parameter& parameter) const {
  if (whole_) return slots_.gradient(slot, parameter);
  const auto element = static_cast<int64_t>(c10::elementSize(parameter.group->wire));
  return slots_.over(slot, own_region(slot) + parameter.shard_offset * element, {parameter.shard.numel()});
}

GradSink WindowReducer::open(Parameter& parameter) {
  const at::NoGradGuard no_grad;
  const int slot = slots_.slot_of(*parameter.group);
  if (!state(slot).open) open_slot(slot);
  parameter.contributed = partial_.holds(parameter);
  if (!parameter.contributed) partial_.open(parameter, shown(slot, parameter));
  return {slots_.gradient(slot, parameter),
          parameter.contributed ? GradSink::Mode::add : GradSink::Mode::overwrite};
}

// This rank's region of its own slot: the sum is made in place, unless replicas' are to be added.
std::vector<buffer::ReduceTarget> WindowReducer::targets(int slot) {
  if (replicas_ != nullptr) return replicas_->overwritten(slots_.group(slot), peers_.rank());
  const ParameterGroup& group = slots_.group(slot);
  return buffer::whole_shard(*group.layout, peers_.rank(), own_region(slot), element_of(group.wire));
}

// Over those that shard, then over the replicas. Of an all-reduce the first half: gather_regions() has the
// other one, when all groups have come so far.
void WindowReducer::sum(int slot, const std::vector<int>& contributors) {
  const buffer::Route route = peers_.route(LaneKind::reduce);
  const buffer::ShardedBuffer partial = slots_.buffer(slot, layout::Placement::partial);
  if (slots_.group(slot).rounds_sums()) {
    buffer::reduce(route, partial, rounded_.targets(slots_.group(slot)), contributors, scale_);
    rounded_.store(slots_.group(slot), targets(slot));
  } else if (whole_ && replicas_ == nullptr) {
    buffer::sum_region(route, partial, slots_.buffer(slot, layout::Placement::replicate), contributors,
                       scale_);
  } else {
    buffer::reduce(route, partial, targets(slot), contributors, scale_);
    if (replicas_ != nullptr) sum_replicas(slot);
  }
}

void WindowReducer::reduce(ParameterGroup& group) {
  const at::NoGradGuard no_grad;
  const int slot = slots_.slot_of(group);
  State& current = state(slot);
  bool any = false;
  if (!current.open) open_slot(slot);
  const uint32_t sequence = ++current.sequence;
  for (const auto& parameter : group.parameters) {
    parameter->contributed = partial_.holds(*parameter);
    any = any || parameter->contributed;
  }
  if (any || !peers_.tells_contributions()) zero_missing(peers_.device(), group, slots_.data(slot));
  for (const auto& parameter : group.parameters) {
    if (!parameter->contributed) partial_.open(*parameter, shown(slot, *parameter));
  }
  slots_.move(slot, device::State::reducing);
  peers_.set_contributed(group.id, sequence, any);
  peers_.device().wait(LaneKind::reduce, peers_.device().record(LaneKind::compute));
  peers_.signal(LaneKind::reduce, "ready " + group.name, Channel::ready(group.id), sequence);
  peers_.wait_all(LaneKind::reduce, "ready " + group.name, Channel::ready(group.id), sequence);
  sum(slot, peers_.contributors(group.id, sequence));
  const bool over = !whole_;
  peers_.signal(LaneKind::reduce, (over ? "pulled " : "reduced ") + group.name,
                over ? Channel::pulled(group.id) : Channel::reduced(group.id), sequence);
  current.pulls_awaited = false;
  reduced_.push_back(slot);
}

// With all gradients on every rank, the sum goes back to this rank's region, where its peers look for it.
void WindowReducer::sum_replicas(int slot) {
  const ParameterGroup& group = slots_.group(slot);
  replicas_->reduce(slots_.group(slot));
  if (!whole_) return;
  peers_.device().copy(LaneKind::reduce, "sum of replicas' " + group.name, own_region(slot),
                       replicas_->shard(group),
                       static_cast<std::size_t>(group.layout->shard_numel()) * sizeof(float));
}

// Every rank has summed its own region; the others' regions are pulled into place. The slot is the user's
// gradient from here on, so nobody may still read it when this returns.
void WindowReducer::gather_regions() {
  for (const int slot : reduced_) {
    const ParameterGroup& group = slots_.group(slot);
    const uint32_t sequence = state(slot).sequence;
    peers_.wait_all(LaneKind::reduce, "reduced " + group.name, Channel::reduced(group.id), sequence);
    buffer::collect_regions(peers_.route(LaneKind::reduce),
                            slots_.buffer(slot, layout::Placement::replicate));
    peers_.signal(LaneKind::reduce, "pulled " + group.name, Channel::pulled(group.id), sequence);
  }
}

void WindowReducer::finish() {
  const at::NoGradGuard no_grad;
  if (whole_) gather_regions();
  peers_.device().wait(LaneKind::compute, peers_.device().record(LaneKind::reduce));
  if (replicas_ != nullptr) replicas_->finish();
  for (const int slot : reduced_) {
    if (whole_) await_pulls(slot);
    for (const auto& parameter : slots_.group(slot).parameters) {
      at::Tensor& gradient = parameter->shard.mutable_grad();
      if (!whole_ && replicas_ != nullptr && gradient.defined()) gradient = replicas_->shown(*parameter);
      partial_.close(*parameter);
      parameter->contributed = false;
    }
    state(slot).open = false;
    slots_.move(slot, device::State::closed);
  }
}

}  // namespace

std::unique_ptr<Reducer> make_window_reducer(Peers& peers, SlotMemory& slots, ReplicaGradients* replicas,
                                             RoundedSums& rounded, float scale, bool whole) {
  return std::make_unique<WindowReducer>(peers, slots, replicas, rounded, scale, whole);
}

}  // namespace fsdpp::runtime
