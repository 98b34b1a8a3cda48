// Core's weights between windows: when and how they are published, and what the ranks agree on then.
#include <algorithm>
#include <cstring>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/runtime/core.h"

namespace fsdpp::runtime {

// The first rank's values everywhere: replicas that start apart stay apart.
void Core::broadcast_from_first(Peers& among, ParameterGroup& held) {
  const auto bytes = held.main->bytes();
  const std::string what = "first " + held.name;
  if (options.offload) {  // between the hosts, whose memory it is
    const auto memory = among.group().allocate(bytes, "first weights of " + held.name);
    if (among.rank() == 0) std::memcpy(memory->peer(0), held.main->data(), bytes);
    among.barrier("first weights");
    std::memcpy(held.main->data(), memory->peer(0), bytes);
    among.barrier("first weights");
    return;
  }
  if (!among.addressable()) return broadcast_by_sum(among, held);
  const auto memory = among.allocate(bytes, "first weights of " + held.name);
  if (among.rank() == 0)
    device->copy(device::LaneKind::gather, what, memory->peer(0), held.main->data(), bytes);
  device->synchronize();
  among.barrier("first weights");
  device->copy(device::LaneKind::gather, what, held.main->data(), memory->peer(0), bytes);
  device->synchronize();
  among.barrier("first weights");
  device->free(device::LaneKind::host, what, {memory->peer(among.rank()), bytes});
}

// The sum of the first rank's values and the others' zeros, in fp32, which has all values of each dtype.
void Core::broadcast_by_sum(Peers& among, ParameterGroup& held) {
  const at::NoGradGuard no_grad;
  comm::Collectives* collectives = among.group().lanes().collectives();
  const auto elements = static_cast<int64_t>(held.main->bytes()) / held.main_bytes(1);
  const at::Tensor main = Elements{held.main->data(), held.main_dtype, held.main_place}.tensor(elements);
  const at::Tensor wide = main.to(at::kFloat);  // `main` itself where it is fp32
  if (among.rank() != 0) wide.zero_();
  device->synchronize();
  const int64_t count = elements / among.ranks();
  float* values = wide.data_ptr<float>();
  float* part = values + among.rank() * count;
  const ByteRange all{values, static_cast<std::size_t>(elements) * sizeof(float)};
  device->run(device::LaneKind::gather, "first " + held.name, {{all}, {all}}, [=] {
    collectives->reduce_scatter(part, values, count);
    collectives->all_gather(values, part, static_cast<std::size_t>(count) * sizeof(float));
  });
  device->synchronize();
  if (!wide.is_same(main)) main.copy_(wide);
}

bool Core::must_publish() const {
  if (publisher->epoch() == 0 || !window_open_) return true;
  return !promised && !in_scope && !backward->turns().open();
}

// Who promised tells when the window ends; for the others its last backward ends it, once its gradients are
// reduced: what follows in the next declared window may come after an optimizer's step.
void Core::settle_window() { window_open_ = promised || !backward->last() || backward->turns().open(); }

// What this rank knows of the last backward: order of completion, and how slots were used.
Core::Seen Core::last_backward() const {
  if (!backward_seen_) return {};
  Seen seen{backward->turns().completed(),
            {reducer->uses().begin(), reducer->uses().end()},
            1469598103934665603ULL};
  const auto mix = [&](uint64_t value) {
    seen.hash = (seen.hash ^ (value + 1)) * 1099511628211ULL;
  };  // FNV-1a
  for (const ParameterGroup* done : seen.completed) mix(static_cast<uint64_t>(done->id));
  for (const SlotUse& use : seen.uses) {
    mix(static_cast<uint64_t>(use.slot));
    mix(static_cast<uint64_t>(use.opened));
  }
  return seen;
}

// All ranks saw the same backward: its order of completion becomes the order of reduces, and slots are
// planned for how they were used. What did not complete keeps its turn at the end.
void Core::adopt(const Seen& seen) {
  std::vector<ParameterGroup*> order = seen.completed;
  for (ParameterGroup* known : backward->turns().order()) {
    if (std::find(order.begin(), order.end(), known) == order.end()) order.push_back(known);
  }
  const bool same_order = order == backward->turns().order();
  backward->turns().set_order(order);
  if (!same_order) return;  // the uses were recorded under another order: plan after the next backward
  if (static_cast<int>(seen.uses.size()) != slots->slots()) return;
  layout::ArenaPlan plan = plan_slots(slots->sizes(), seen.uses);
  if (plan.same_places(slots->plan())) return;
  settle();  // the old places may still be read
  slots->replan(std::move(plan));
}

// Every lane of every rank is empty when it returns. Collective.
void Core::settle() {
  device->synchronize();
  if (!device->runs_inline()) everyone().barrier("settled");
}

void Core::publish(const std::function<void()>& update) {
  require(!backward->holds_slots(),
          "weights were changed while gradients lie in their slots that have still to be reduced; call "
          "backward_dw() or finish_reduces() before an optimizer's step");
  residency->complete_parts();  // of a forward that raised: all ranks keep as often
  Seen seen = last_backward();
  const std::vector<uint64_t> votes = everyone().exchange_votes(publisher->epoch() + 1, seen.hash);
  const bool complete = backward->last() && !backward->turns().open();
  publisher->publish(update, complete);
  window_open_ = false;
  backward_seen_ = false;
  // Every peer has come here, so all pulls of the last backward are over. Before what renew() gathers: the
  // compute lane waits for that, hence for this.
  if (!backward->active()) slots->retire_all();
  residency->renew();
  const bool agreed = told_.hash != 0 && std::all_of(votes.begin(), votes.end(),
                                                     [&](uint64_t vote) { return vote == told_.hash; });
  if (agreed) adopt(told_);
  told_ = std::move(seen);
  if (orders_changed_ && residency->at_rest()) {
    residency->arena().replan(weight_plan());
    orders_changed_ = false;
  }
}

void Core::publish_by(const std::function<void()>& update) {
  publish(update);
  window_open_ = true;  // what is published is what the main weights are
}

void Core::refresh() {
  if (!must_publish()) return;
  publish();
  window_open_ = promised;  // until a change is told
}

}  // namespace fsdpp::runtime
