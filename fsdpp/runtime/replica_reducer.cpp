#include <utility>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/runtime/reducer.h"

namespace fsdpp::runtime {
namespace {

using device::LaneKind;

class ReplicaReducer final : public Reducer {
 public:
  ReplicaReducer(Peers& peers, SlotMemory& slots, float scale)
      : peers_(peers), slots_(slots), scale_(scale), states_(static_cast<std::size_t>(slots.slots())) {
    for (int slot = 0; slot < slots_.slots(); ++slot) {
      states_[static_cast<std::size_t>(slot)].carried.resize(slots_.group(slot).parameters.size());
      states_[static_cast<std::size_t>(slot)].version.resize(slots_.group(slot).parameters.size());
    }
  }

  GradSink open(Parameter& parameter) override;
  void contribute(Parameter& parameter, const RowWriter& write) override {
    write_rows(peers_.device(), parameter, open(parameter), {0, parameter.sizes[0]}, write);
    parameter.contributed = true;
  }

  [[nodiscard]] bool reduces_every_backward() const noexcept override { return false; }

  void begin() override { reduced_.clear(); }
  void forget() override {}  // everything shows in the gradients

  void reduce(ParameterGroup& group) override;
  void finish() override;

  [[nodiscard]] std::span<const SlotUse> uses() const noexcept override { return reduced_; }
  [[nodiscard]] int64_t spills() const noexcept override { return 0; }

 private:
  // The accumulator is Partial from its first contribution to its reduce, or to zero_grad. The user sees it
  // as the shards' gradients, so that any optimizer's zero_grad closes it.
  struct State {
    bool open = false;
    uint32_t sequence = 0;            // of the last reduce
    std::vector<at::Tensor> carried;  // per parameter: the reduced gradient that was there when it opened
    std::vector<uint32_t>
        version;  // per parameter: of the shard's gradient, which our own writes leave alone
  };

  State& state(int slot) { return states_[static_cast<std::size_t>(slot)]; }
  void open_slot(int slot);
  void forget_if_zeroed(Parameter& parameter, State& current);
  [[nodiscard]] bool is_in_slot(const at::Tensor& gradient, const Parameter& parameter) const;
  void take_back(Parameter& parameter, State& current);
  void put_in_slot(Parameter& parameter, int slot);
  std::vector<buffer::ReduceTarget> own_region(int slot);

  Peers& peers_;
  SlotMemory& slots_;
  float scale_;
  std::vector<State> states_;
  std::vector<SlotUse> reduced_;
};

// Gradients of the last window may still lie in the slot; they move out before it is written.
void ReplicaReducer::open_slot(int slot) {
  State& opened = state(slot);
  opened.open = true;
  slots_.move(slot, device::State::open);
  for (const auto& parameter : slots_.group(slot).parameters) {
    parameter->contributed = false;
    at::Tensor& gradient = parameter->shard.mutable_grad();
    if (gradient.defined()) gradient = gradient.detach().clone();
  }
  slots_.begin_life(slot);
}

// zero_grad since the last contribution: what was accumulated and carried is dropped. With set_to_none the
// shard has no gradient; without, somebody else wrote it and it is zero now (what was accumulated lies in it
// and is gone).
void ReplicaReducer::forget_if_zeroed(Parameter& parameter, State& current) {
  if (!parameter.contributed) return;
  const auto index = static_cast<std::size_t>(parameter.index);
  const at::Tensor& gradient = parameter.shard.grad();
  if (!gradient.defined()) {
    parameter.contributed = false;
    current.carried[index].reset();
  } else if (!is_in_slot(gradient, parameter)) {
    take_back(parameter, current);
  } else if (gradient._version() != current.version[index]) {
    current.version[index] = gradient._version();
    if (gradient.count_nonzero().item<int64_t>() == 0) current.carried[index].reset();
  }
}

bool ReplicaReducer::is_in_slot(const at::Tensor& gradient, const Parameter& parameter) const {
  const int slot = slots_.slot_of(*parameter.group);
  return gradient.const_data_ptr() == slots_.gradient(slot, parameter).const_data_ptr() ||
         gradient.numel() == 0;
}

// The user put a tensor of his own in the place of what was accumulated: that is what counts from here on.
void ReplicaReducer::take_back(Parameter& parameter, State& current) {
  at::Tensor& gradient = parameter.shard.mutable_grad();
  require(gradient.sizes() == at::IntArrayRef(parameter.sizes), "the gradient of ", parameter.name,
          " was replaced by one of sizes ", gradient.sizes(), "; expected ",
          at::IntArrayRef(parameter.sizes));
  const at::Tensor view = slots_.gradient(slots_.slot_of(*parameter.group), parameter);
  view.copy_(gradient);
  gradient = slots_.gradient(slots_.slot_of(*parameter.group), parameter);
  current.version[static_cast<std::size_t>(parameter.index)] = gradient._version();
}

void ReplicaReducer::put_in_slot(Parameter& parameter, int slot) {
  const auto index = static_cast<std::size_t>(parameter.index);
  at::Tensor& gradient = parameter.shard.mutable_grad();
  state(slot).carried[index] = gradient;
  gradient = slots_.gradient(slot, parameter);
  state(slot).version[index] = gradient._version();
}

GradSink ReplicaReducer::open(Parameter& parameter) {
  const at::NoGradGuard no_grad;
  const int slot = slots_.slot_of(*parameter.group);
  if (!state(slot).open) open_slot(slot);
  forget_if_zeroed(parameter, state(slot));
  const at::Tensor view = slots_.gradient(slot, parameter);
  if (parameter.contributed) return {view, GradSink::Mode::add};
  put_in_slot(parameter, slot);
  return {view, GradSink::Mode::overwrite};
}

std::vector<buffer::ReduceTarget> ReplicaReducer::own_region(int slot) {
  const ParameterGroup& group = slots_.group(slot);
  auto* region = reinterpret_cast<float*>(slots_.data(slot)) + peers_.rank() * group.layout->shard_numel();
  std::vector<buffer::ReduceTarget> result;
  for (const layout::Segment& segment : group.layout->segments(peers_.rank())) {
    result.push_back({segment, region + segment.shard_offset, false});
  }
  return result;
}

void ReplicaReducer::reduce(ParameterGroup& group) {
  const at::NoGradGuard no_grad;
  const int slot = slots_.slot_of(group);
  State& current = state(slot);
  const uint32_t sequence = ++current.sequence;
  bool any = false;
  if (!current.open) open_slot(slot);
  for (const auto& parameter : group.parameters) {
    forget_if_zeroed(*parameter, current);
    any = any || parameter->contributed;
  }
  if (any || !peers_.tells_contributions()) zero_missing(peers_.device(), group, slots_.data(slot));
  for (const auto& parameter : group.parameters) {
    if (!parameter->contributed) put_in_slot(*parameter, slot);
  }
  slots_.move(slot, device::State::reducing);
  peers_.set_contributed(group.id, sequence, any);
  peers_.device().wait(LaneKind::reduce, peers_.device().record(LaneKind::compute));
  peers_.signal(LaneKind::reduce, "ready " + group.name, Channel::ready(group.id), sequence);
  peers_.wait_all(LaneKind::reduce, "ready " + group.name, Channel::ready(group.id), sequence);
  buffer::reduce(peers_.route(LaneKind::reduce), slots_.buffer(slot, layout::Placement::partial),
                 own_region(slot), peers_.contributors(group.id, sequence), scale_);
  peers_.signal(LaneKind::reduce, "reduced " + group.name, Channel::reduced(group.id), sequence);
  reduced_.push_back({slot, static_cast<int>(reduced_.size())});
}

// Every rank has summed its own region; the others' regions are pulled into place. The slot is the user's
// gradient from here on, so nobody may still read it when this returns.
void ReplicaReducer::finish() {
  const at::NoGradGuard no_grad;
  for (const SlotUse& use : reduced_) {
    const ParameterGroup& group = slots_.group(use.slot);
    const uint32_t sequence = state(use.slot).sequence;
    peers_.wait_all(LaneKind::reduce, "reduced " + group.name, Channel::reduced(group.id), sequence);
    buffer::gather(peers_.route(LaneKind::reduce), slots_.buffer(use.slot, layout::Placement::shard),
                   slots_.data(use.slot));
    peers_.signal(LaneKind::reduce, "pulled " + group.name, Channel::pulled(group.id), sequence);
  }
  for (const SlotUse& use : reduced_) {
    const ParameterGroup& group = slots_.group(use.slot);
    State& current = state(use.slot);
    peers_.wait_all(LaneKind::reduce, "pulled " + group.name, Channel::pulled(group.id), current.sequence);
    peers_.device().wait(LaneKind::compute, peers_.device().record(LaneKind::reduce));
    for (const auto& parameter : group.parameters) {
      at::Tensor& carried = current.carried[static_cast<std::size_t>(parameter->index)];
      if (carried.defined()) parameter->shard.mutable_grad().add_(carried);
      carried.reset();
      parameter->contributed = false;
    }
    current.open = false;
    slots_.move(use.slot, device::State::closed);
  }
}

}  // namespace

std::unique_ptr<Reducer> make_replica_reducer(Peers& peers, SlotMemory& slots, float scale) {
  return std::make_unique<ReplicaReducer>(peers, slots, scale);
}

}  // namespace fsdpp::runtime
