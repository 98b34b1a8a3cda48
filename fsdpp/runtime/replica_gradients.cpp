#include "fsdpp/runtime/replica_gradients.h"

#include <algorithm>
#include <utility>

#include "fsdpp/base/error.h"

namespace fsdpp::runtime {
namespace {

using device::LaneKind;
constexpr const char* kSummedShards = "gradient shards";
constexpr auto kFp32Bytes = static_cast<int64_t>(sizeof(float));

int64_t bytes_of(const ParameterGroup& group) { return group.layout->shard_numel() * kFp32Bytes; }

}  // namespace

ReplicaGradients::ReplicaGradients(Peers& replicas, const std::vector<ParameterGroup*>& groups, bool scatter,
                                   std::shared_ptr<device::Ledger> ledger)
    : replicas_(replicas), scatter_(scatter), ledger_(std::move(ledger)), partial_(/*shows_all=*/!scatter) {
  int64_t largest = 0;
  for (const ParameterGroup* group : groups) {
    State& made = states_[group];
    made.memory = replicas_.allocate(static_cast<std::size_t>(bytes_of(*group)), kSummedShards);
    made.layout = std::make_shared<const layout::ShardLayout>(layout::ShardLayout::flat(
        {{group->name, {group->layout->shard_numel()}}}, kFp32Bytes, replicas_.ranks()));
    FSDPP_INVARIANT(made.layout->padding_numel() == 0, "the shard of ", group->name, " cannot be cut in ",
                    replicas_.ranks());
    ledger_->add(kSummedShards, bytes_of(*group));
    largest = std::max(largest, bytes_of(*group) / replicas_.ranks());
  }
  replicas_.prepare_staging(largest, ledger_);
}

ReplicaGradients::~ReplicaGradients() {
  for (const auto& [group, made] : states_) ledger_->remove(kSummedShards, bytes_of(*group));
}

float* ReplicaGradients::shard(const ParameterGroup& group) const {
  return reinterpret_cast<float*>(states_.at(&group).memory->peer(replicas_.rank()));
}

at::Tensor ReplicaGradients::shown(const Parameter& parameter) const {
  const ParameterGroup& group = *parameter.group;
  return tensor_over(states_.at(&group).memory, shard(group) + parameter.shard_offset,
                     {parameter.shard.numel()}, at::TensorOptions(group.place).dtype(at::kFloat));
}

buffer::ShardedBuffer ReplicaGradients::buffer(const ParameterGroup& group,
                                               layout::Placement placement) const {
  const State& made = states_.at(&group);
  std::vector<std::byte*> parts;
  for (int rank = 0; rank < replicas_.ranks(); ++rank) {
    parts.push_back(made.memory->peer(rank));
  }
  return {group.name + " of replicas", made.layout,     placement, replicas_.rank(),
          device::Element::fp32,       std::move(parts)};
}

void ReplicaGradients::await_pulls(LaneKind lane, const ParameterGroup& group) {
  State& current = state(group);
  if (std::exchange(current.pulls_awaited, true)) return;
  replicas_.wait_all(lane, "pulled replicas' " + group.name, Channel::pulled(group.id), current.sequence);
}

std::vector<buffer::ReduceTarget> ReplicaGradients::targets(ParameterGroup& group, int rank) {
  const at::NoGradGuard no_grad;
  std::vector<bool> held;
  bool any = false;
  for (const auto& parameter : group.parameters) {
    held.push_back(partial_.holds(*parameter));
    any = any || held.back();
  }
  await_pulls(LaneKind::reduce, group);
  for (std::size_t i = 0; i < held.size(); ++i) {
    if (held[i]) continue;
    partial_.move_out(*group.parameters[i]);
    partial_.open(*group.parameters[i], shown(*group.parameters[i]));
  }
  std::vector<buffer::ReduceTarget> result = buffer::whole_shard(*group.layout, rank, shard(group));
  for (buffer::ReduceTarget& target : result)
    target.add = held[static_cast<std::size_t>(target.segment.parameter)];
  return result;
}

std::vector<buffer::ReduceTarget> ReplicaGradients::overwritten(ParameterGroup& group, int rank) {
  await_pulls(LaneKind::reduce, group);
  return buffer::whole_shard(*group.layout, rank, shard(group));
}

void ReplicaGradients::reduce(ParameterGroup& group) {
  State& current = state(group);
  const uint32_t sequence = ++current.sequence;
  std::vector<int> all(static_cast<std::size_t>(replicas_.ranks()));
  for (int rank = 0; rank < replicas_.ranks(); ++rank) all[static_cast<std::size_t>(rank)] = rank;
  const std::string of = " replicas' " + group.name;
  replicas_.device().wait(LaneKind::reduce, replicas_.device().record(LaneKind::compute));
  replicas_.signal(LaneKind::reduce, "ready" + of, Channel::ready(group.id), sequence);
  replicas_.wait_all(LaneKind::reduce, "ready" + of, Channel::ready(group.id), sequence);
  const buffer::Route route = replicas_.route(LaneKind::reduce);
  const buffer::ShardedBuffer partial = buffer(group, layout::Placement::partial);
  if (scatter_) {
    float* own = shard(group) + replicas_.rank() * current.layout->shard_numel();
    buffer::reduce(route, partial, buffer::whole_shard(*current.layout, replicas_.rank(), own), all,
                   /*scale=*/1);
  } else {
    buffer::all_reduce(route, partial, buffer(group, layout::Placement::replicate), all, /*scale=*/1, [&] {
      replicas_.signal(LaneKind::reduce, "reduced" + of, Channel::reduced(group.id), sequence);
      replicas_.wait_all(LaneKind::reduce, "reduced" + of, Channel::reduced(group.id), sequence);
    });
  }
  replicas_.signal(LaneKind::reduce, "pulled" + of, Channel::pulled(group.id), sequence);
  current.pulls_awaited = false;
  summed_.push_back(&group);
}

// A whole sum is the user's to change from here on, so nobody may still read it; of a part nobody reads more.
void ReplicaGradients::finish() {
  const at::NoGradGuard no_grad;
  replicas_.device().wait(LaneKind::compute, replicas_.device().record(LaneKind::reduce));
  for (ParameterGroup* group : summed_) {
    if (!scatter_) await_pulls(LaneKind::compute, *group);
    for (const auto& parameter : group->parameters) partial_.close(*parameter);
  }
  summed_.clear();
}

void ReplicaGradients::check(ParameterGroup& group) {
  for (const auto& parameter : group.parameters) static_cast<void>(partial_.holds(*parameter));
}

void ReplicaGradients::forget() {
  for (const auto& [group, made] : states_)
    for (const auto& parameter : group->parameters) partial_.drop_refused(*parameter);
}

}  // namespace fsdpp::runtime
