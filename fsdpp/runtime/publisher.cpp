#include "fsdpp/runtime/publisher.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "fsdpp/base/bytes.h"

namespace fsdpp::runtime {
namespace {

using device::LaneKind;
constexpr const char* kPublished = "published weights";
constexpr const char* kKept = "full weights that stay";

}  // namespace

Publisher::Publisher(Peers& peers, Peers* replicas, comm::PeerGroup& whole,
                     std::vector<ParameterGroup*> groups, const std::vector<ParameterGroup*>& kept,
                     bool offload, std::shared_ptr<device::Ledger> ledger)
    : peers_(peers),
      replicas_(replicas),
      groups_(std::move(groups)),
      offload_(offload),
      ledger_(std::move(ledger)) {
  for (auto& epochs : awaited_) epochs.resize(groups_.size());
  const auto stays = [&](const ParameterGroup* group) {
    return std::find(kept.begin(), kept.end(), group) != kept.end();
  };
  std::vector<int64_t> offsets;
  for (const ParameterGroup* group : groups_) {
    offsets.push_back(published_bytes_ + kept_bytes_);
    if (!shards_optimizer(group->strategy)) continue;
    const int64_t bytes = round_up(stays(group) ? group->full_bytes() : group->shard_bytes(), kAlignment);
    (stays(group) ? kept_bytes_ : published_bytes_) += bytes;
  }
  if (published_bytes_ + kept_bytes_ == 0) return;
  memory_ = allocate(whole);
  ledger_->add(kPublished, published_bytes_);
  ledger_->add(kKept, kept_bytes_);
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    if (shards_optimizer(groups_[i]->strategy)) place(*groups_[i], offsets[i], stays(groups_[i]));
  }
}

// Memory that the ranks that shard can read, and the replicas if these read each other's.
std::shared_ptr<comm::PeerMemory> Publisher::allocate(comm::PeerGroup& whole) {
  const auto bytes = static_cast<std::size_t>(published_bytes_ + kept_bytes_);
  if (replicas_ == nullptr || !replicas_->addressable()) return peers_.allocate(bytes, kPublished);
  const auto all = whole.lanes().allocate(bytes, kPublished);
  replicas_memory_ = replicas_->view(all);
  return peers_.view(all);
}

void Publisher::place(ParameterGroup& group, int64_t offset, bool stays) {
  const auto shard_at = [&](std::byte* base, int rank) {
    return base == nullptr ? nullptr : base + offset + (stays ? rank * group.shard_bytes() : 0);
  };
  std::vector<std::byte*> shards;
  for (int rank = 0; rank < peers_.ranks(); ++rank) shards.push_back(shard_at(memory_->peer(rank), rank));
  std::byte* own = shards[static_cast<std::size_t>(peers_.rank())];
  group.published.emplace(group.name, group.layout, layout::Placement::shard, peers_.rank(),
                          element_of(group.dtype), std::move(shards));
  if (stays) group.own_place = memory_->peer(peers_.rank()) + offset;
  if (replicas_ == nullptr) return;
  const auto cut = std::make_shared<const layout::ShardLayout>(layout::ShardLayout::flat(
      {{group.name, {group.layout->shard_numel()}}}, group.element_bytes(), replicas_->ranks()));
  std::vector<std::byte*> parts;
  for (int replica = 0; replica < replicas_->ranks(); ++replica) {
    std::byte* base = replicas_memory_ ? replicas_memory_->peer(replica) : nullptr;
    std::byte* shard = replica == replicas_->rank() ? own : shard_at(base, peers_.rank());
    const int64_t before = replica * cut->shard_numel() * group.element_bytes();
    parts.push_back(shard == nullptr ? nullptr : shard + before);
  }
  parts_.emplace_back(group.name + " of replicas", cut, layout::Placement::shard, replicas_->rank(),
                      element_of(group.dtype), std::move(parts));
}

Publisher::~Publisher() {
  for (ParameterGroup* group : groups_) group->published.reset();
  if (!memory_) return;
  ledger_->remove(kPublished, published_bytes_);
  ledger_->remove(kKept, kept_bytes_);
}

// Everybody has finished with the last epoch: on the gather lane.
void Publisher::release_last() {
  for (Peers* readers : {&peers_, replicas_}) {
    if (readers != nullptr) readers->signal(LaneKind::gather, "released", Channel::kReleased, epoch_ + 1);
  }
  for (Peers* readers : {&peers_, replicas_}) {
    if (readers != nullptr) readers->wait_all(LaneKind::gather, "released", Channel::kReleased, epoch_ + 1);
  }
}

// The replicas' parts come to their places in this rank's shard, which is published then.
void Publisher::gather_parts() {
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const ParameterGroup& group = *groups_[i];
    replicas_->wait_all(LaneKind::gather, "published replicas' " + group.name, Channel::published(group.id),
                        epoch_);
    buffer::gather(replicas_->route(LaneKind::gather), parts_[i], group.published->local());
    peers_.signal(LaneKind::gather, "published " + group.name, Channel::published(group.id), epoch_);
  }
}

void Publisher::publish(const std::function<void()>& update, bool complete) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  device::Device& device = peers_.device();
  if (!update) {
    for (const ParameterGroup* group : groups_) announce_update(*group, complete);
  }
  device.wait(LaneKind::gather, device.record(LaneKind::compute));
  release_last();
  ++epoch_;
  Peers& first = replicas_ != nullptr ? *replicas_ : peers_;  // to hear of what this rank has updated
  if (update) {
    device.wait(LaneKind::compute, device.record(LaneKind::gather));
    update();
    device.wait(LaneKind::gather, device.record(LaneKind::compute));
    first.signal_published(LaneKind::gather, epoch_);
  } else {
    const std::string whose = replicas_ != nullptr ? "published replicas' " : "published ";
    for (ParameterGroup* group : groups_) {
      transform(*group);
      first.signal(LaneKind::gather, whose + group->name, Channel::published(group->id), epoch_);
    }
  }
  if (replicas_ != nullptr) gather_parts();
  published_ = device.record(LaneKind::gather);
  // An optimizer may write main weights whether or not a gather, behind which this is, was waited for.
  device.wait(LaneKind::compute, published_);
}

// What no operation names: the optimizer, any optimizer, read gradients and wrote main weights on the compute
// lane, or (offload) the host. There none reads them before they are complete, which is when they come down.
void Publisher::announce_update(const ParameterGroup& group, bool complete) {
  device::Access access{{}, {{group.main->data(), group.main->bytes()}}};
  for (const auto& parameter : group.parameters) {
    const at::Tensor& gradient = parameter->shard.grad();
    const bool read = complete || !offload_;
    if (gradient.defined() && read) access.reads.push_back({gradient.const_data_ptr(), gradient.nbytes()});
  }
  peers_.device().announce(offload_ ? LaneKind::host : LaneKind::compute, "update " + group.name,
                           std::move(access));
}

void Publisher::transform(ParameterGroup& group) {
  const bool sharded = shards_optimizer(group.strategy);
  std::byte* target =
      sharded ? group.published->local() + group.main_offset * group.element_bytes() : group.weights->data();
  if (target == group.main->data()) return;  // the model reads the main weights themselves
  if (offload_) return send_up(group, target);
  const int64_t count = sharded ? group.main_numel() : group.layout->full_numel();
  const Elements source{group.main->data(), group.main_dtype, group.place};
  const Elements published{target, group.dtype, group.place};
  const auto bytes = static_cast<std::size_t>(count * group.element_bytes());
  const std::string what = "publish " + group.name;
  if (group.dtype == group.main_dtype && group.dtype != at::kFloat)
    return peers_.device().copy(LaneKind::gather, what, target, source.data, bytes);
  device::Access access{{{source.data, static_cast<std::size_t>(group.main_bytes(count))}},
                        {{target, bytes}}};
  peers_.device().run(LaneKind::gather, what, std::move(access),
                      [=] { cast_elements(source, count, published); });
}

// Cast by the host, and copied while it casts the next group.
void Publisher::send_up(ParameterGroup& group, std::byte* target) {
  device::Device& device = peers_.device();
  Staging& staging = staging_[&group];
  const auto bytes = static_cast<std::size_t>(group.main_numel() * group.element_bytes());
  if (staging.memory.data() == nullptr)
    staging.memory = device.allocate_on_host(bytes, "weights on their way up, in host memory", ledger_);
  if (staging.sent) device.wait(LaneKind::host, *staging.sent);
  const Elements source{group.main->data(), group.main_dtype};
  const Elements cast{staging.memory.data(), group.dtype};
  device::Access access{{{source.data, group.main->bytes()}}, {{cast.data, bytes}}};
  device.run(LaneKind::host, "cast " + group.name, std::move(access),
             [=, count = group.main_numel()] { cast_elements(source, count, cast); });
  device.copy(LaneKind::gather, "publish " + group.name, target, cast.data, bytes);
  staging.sent = device.record(LaneKind::gather);
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
