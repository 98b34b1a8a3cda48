#include "fsdpp/runtime/publisher.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "fsdpp/base/bytes.h"

namespace fsdpp::runtime {
namespace {

using device::LaneKind;
constexpr const char* kPurpose = "published weights";
constexpr const char* kKept = "full weights that stay";

}  // namespace

Publisher::Publisher(Peers& peers, std::vector<ParameterGroup*> groups,
                     const std::vector<ParameterGroup*>& kept, Strategy strategy,
                     std::shared_ptr<device::Ledger> ledger)
    : peers_(peers), groups_(std::move(groups)), strategy_(strategy), ledger_(std::move(ledger)) {
  for (auto& epochs : awaited_) epochs.resize(groups_.size());
  if (!shards_optimizer(strategy_)) return;
  const auto stays = [&](const ParameterGroup* group) {
    return std::find(kept.begin(), kept.end(), group) != kept.end();
  };
  std::vector<int64_t> offsets;
  for (const ParameterGroup* group : groups_) {
    offsets.push_back(published_bytes_ + kept_bytes_);
    const int64_t bytes = round_up(stays(group) ? group->full_bytes() : group->shard_bytes(), kAlignment);
    (stays(group) ? kept_bytes_ : published_bytes_) += bytes;
  }
  if (published_bytes_ + kept_bytes_ == 0) return;
  memory_ = peers_.allocate(static_cast<std::size_t>(published_bytes_ + kept_bytes_), kPurpose);
  ledger_->add(kPurpose, published_bytes_);
  ledger_->add(kKept, kept_bytes_);
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    ParameterGroup& group = *groups_[i];
    std::vector<std::byte*> parts;
    for (int rank = 0; rank < peers_.ranks(); ++rank)
      parts.push_back(memory_->peer(rank) + offsets[i] + (stays(&group) ? rank * group.shard_bytes() : 0));
    group.published.emplace(group.name, group.layout, layout::Placement::shard, peers_.rank(),
                            group.element_bytes(), std::move(parts));
    if (stays(&group)) group.own_place = memory_->peer(peers_.rank()) + offsets[i];
  }
}

Publisher::~Publisher() {
  for (ParameterGroup* group : groups_) group->published.reset();
  if (!memory_) return;
  ledger_->remove(kPurpose, published_bytes_);
  ledger_->remove(kKept, kept_bytes_);
}

std::vector<uint64_t> Publisher::publish(uint64_t vote, const std::function<void()>& update) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  device::Device& device = peers_.device();
  const uint32_t next = epoch_ + 1;
  std::vector<uint64_t> votes = peers_.exchange_votes(next, vote);
  if (!update) {
    for (const ParameterGroup* group : groups_) announce_update(*group);
  }
  device.wait(LaneKind::gather, device.record(LaneKind::compute));
  peers_.signal(LaneKind::gather, "released", Channel::kReleased, next);
  peers_.wait_all(LaneKind::gather, "released", Channel::kReleased, next);
  epoch_ = next;
  if (update) {
    device.wait(LaneKind::compute, device.record(LaneKind::gather));
    update();
    device.wait(LaneKind::gather, device.record(LaneKind::compute));
    peers_.signal_published(LaneKind::gather, epoch_);
  } else {
    for (ParameterGroup* group : groups_) {
      transform(*group);
      peers_.signal(LaneKind::gather, "published " + group->name, Channel::published(group->id), epoch_);
    }
  }
  published_ = device.record(LaneKind::gather);
  // Without a gather to wait for, the compute lane reads here what the transform wrote; and no lane is left
  // behind at the end of a step.
  if (update || !shards_optimizer(strategy_)) device.wait(LaneKind::compute, published_);
  return votes;
}

// What no operation names: the optimizer, any optimizer, read gradients and wrote main weights on the compute
// lane.
void Publisher::announce_update(const ParameterGroup& group) {
  device::Access access{{}, {{group.main->data(), group.main->bytes()}}};
  for (const auto& parameter : group.parameters) {
    const at::Tensor& gradient = parameter->shard.grad();
    if (gradient.defined()) access.reads.push_back({gradient.const_data_ptr(), gradient.nbytes()});
  }
  peers_.device().announce(LaneKind::compute, "update " + group.name, std::move(access));
}

void Publisher::transform(ParameterGroup& group) {
  const bool sharded = shards_optimizer(strategy_);
  std::byte* target = sharded ? group.published->local() : group.weights->data();
  if (target == group.main->data()) return;  // the model reads the main weights themselves
  const int64_t count = sharded ? group.layout->shard_numel() : group.layout->full_numel();
  const auto* source = reinterpret_cast<const float*>(group.main->data());
  device::Access access{{{source, static_cast<std::size_t>(count) * sizeof(float)}},
                        {{target, static_cast<std::size_t>(count * group.element_bytes())}}};
  peers_.device().run(
      LaneKind::gather, "publish " + group.name, std::move(access),
      [=, dtype = group.dtype, place = group.place] { cast_elements(source, count, dtype, target, place); });
}

// The lane is in order: once per epoch is enough.
void Publisher::await(LaneKind lane, const ParameterGroup& group) {
  uint32_t& awaited = awaited_[static_cast<std::size_t>(lane)].at(static_cast<std::size_t>(group.id));
  if (awaited == epoch_) return;
  peers_.device().wait(lane, published_);
  peers_.wait_all(lane, "published " + group.name, Channel::published(group.id), epoch_);
  awaited = epoch_;
}

void Publisher::gather(const ParameterGroup& group, std::byte* full) {
  await(LaneKind::gather, group);
  buffer::gather(peers_.route(LaneKind::gather), *group.published, full);
}

}  // namespace fsdpp::runtime
