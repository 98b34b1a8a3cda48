#include "fsdpp/runtime/inner_shards.h"

#include <utility>

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"

namespace fsdpp::runtime {
namespace {

using device::LaneKind;
constexpr const char* kKeptForNeighbours = "weights kept for neighbours";

std::unique_ptr<comm::PeerGroup> neighbours_of(comm::PeerGroup& shard, int size) {
  std::vector<int> members;
  for (int i = 0; i < size; ++i) members.push_back(shard.rank() / size * size + i);
  return shard.part(members, shard.name() + "/inner");
}

}  // namespace

InnerShards::InnerShards(comm::PeerGroup& shard, int size, device::Device& device,
                         const std::vector<std::string>& names, const std::vector<ParameterGroup*>& groups,
                         int first_channel, std::shared_ptr<device::Ledger> ledger)
    : neighbours_(neighbours_of(shard, size)),
      peers_(*neighbours_, device, names, first_channel),
      ledger_(std::move(ledger)) {
  std::vector<int64_t> offsets;
  for (const ParameterGroup* group : groups) {
    offsets.push_back(bytes_);
    bytes_ += round_up(group->full_bytes() / size, kAlignment);
  }
  memory_ = peers_.allocate(static_cast<std::size_t>(bytes_), kKeptForNeighbours);
  ledger_->add(kKeptForNeighbours, bytes_);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const ParameterGroup& group = *groups[i];
    const auto cut = std::make_shared<const layout::ShardLayout>(
        layout::ShardLayout::flat({{group.name, {group.layout->full_numel()}}}, group.element_bytes(), size));
    FSDPP_INVARIANT(cut->padding_numel() == 0, "the weights of ", group.name, " cannot be cut in ", size);
    std::vector<std::byte*> parts;
    for (int rank = 0; rank < size; ++rank) {
      std::byte* base = memory_->peer(rank);  // null: not addressable
      parts.push_back(base == nullptr ? nullptr : base + offsets[i]);
    }
    states_.emplace(&group, State{{group.name + " of neighbours", cut, layout::Placement::shard,
                                   peers_.rank(), element_of(group.dtype), std::move(parts)}});
  }
}

InnerShards::~InnerShards() { ledger_->remove(kKeptForNeighbours, bytes_); }

void InnerShards::keep(const ParameterGroup& group, const std::byte* full, uint32_t epoch) {
  State& state = states_.at(&group);
  const int64_t bytes = state.parts.shard_bytes();
  peers_.device().copy(LaneKind::gather, "keep " + group.name, state.parts.local(),
                       full + peers_.rank() * bytes, static_cast<std::size_t>(bytes));
  signal_kept(group, state, epoch);
}

bool InnerShards::keep_published(const ParameterGroup& group, uint32_t epoch) {
  State& state = states_.at(&group);
  const int shards = group.layout->ranks() / peers_.ranks();  // in a part
  const auto bytes = static_cast<std::size_t>(group.shard_bytes());
  std::vector<device::Copy> copies;
  for (int i = 0; i < shards; ++i) {
    const std::byte* shard = group.published->part(peers_.rank() * shards + i);
    if (shard == nullptr) return false;
    copies.push_back({state.parts.local() + static_cast<std::size_t>(i) * bytes, shard, bytes});
  }
  peers_.device().copy_all(LaneKind::gather, "keep " + group.name, std::move(copies));
  signal_kept(group, state, epoch);
  return true;
}

void InnerShards::signal_kept(const ParameterGroup& group, State& state, uint32_t epoch) {
  state.epoch = epoch;
  peers_.signal(LaneKind::gather, "kept " + group.name, Channel::published(group.id), ++state.sequence);
}

bool InnerShards::gather(const ParameterGroup& group, std::byte* full, uint32_t epoch) {
  if (complete_ != epoch) return false;
  const State& state = states_.at(&group);
  peers_.wait_all(LaneKind::gather, "kept " + group.name, Channel::published(group.id), state.sequence);
  buffer::gather(peers_.route(LaneKind::gather), state.parts, full);
  return true;
}

}  // namespace fsdpp::runtime
