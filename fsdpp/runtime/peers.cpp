#include "fsdpp/runtime/peers.h"

#include <algorithm>
#include <utility>

#include "fsdpp/base/error.h"

namespace fsdpp::runtime {
namespace {

// Of one peer's slice at a time: enough that launching the pieces costs nothing beside moving them.
constexpr int64_t kStagingPerPeer = int64_t{32} << 20;  // bytes

// A rank that tells epoch e has seen every peer tell e - 2: those may still read e - 3, and nothing before.
constexpr int kVotes = 4;
constexpr int kNeeds = 2;  // who tells need n + 2 has seen every peer tell n + 1, hence read n
constexpr int kWords = kVotes + kNeeds;

std::string place(int gpu) { return gpu < 0 ? "the host" : text("GPU ", gpu); }

std::vector<std::string> channel_names(const std::vector<std::string>& groups) {
  std::vector<std::string> names = {"released", "scalars"};
  for (const std::string& group : groups) {
    for (const char* what : {"published ", "ready ", "reduced ", "pulled ", "rows ready ", "rows pulled "})
      names.push_back(what + group);
  }
  return names;
}

}  // namespace

void check_lanes(comm::PeerGroup& group, const device::Device& device) {
  require(device.gpu() == group.lanes().gpu(), "the model's lanes run on ", place(device.gpu()),
          ", but the group's lanes reach ", place(group.lanes().gpu()),
          ": give fully_shard() a device of the same kind as the group's lanes");
}

Peers::Peers(comm::PeerGroup& group, device::Device& device, const std::vector<std::string>& groups,
             int first_channel)
    : group_(group),
      device_(device),
      first_channel_(first_channel),
      tells_(device.runs_inline() && addressable()),
      groups_(groups) {
  check_lanes(group, device);
  board_ = group.lanes().signals(channel_names(groups), "signals of a sharded model");
  votes_ = group.signals({"vote", "need"}, "votes of a sharded model");
  words_ = group.allocate((kWords + 2 * groups.size()) * sizeof(uint64_t), "words of a sharded model");
}

void Peers::prepare_staging(int64_t shard_bytes, std::shared_ptr<device::Ledger> ledger) {
  int64_t bytes = 0;
  if (group_.lanes().collectives() != nullptr) {
    bytes = shard_bytes;
  } else if (device_.gpu() >= 0) {
    bytes = (ranks() - 1) * std::min(shard_bytes, kStagingPerPeer);
  }
  staging_ = device_.allocate(static_cast<std::size_t>(bytes), "staging of reduces", std::move(ledger));
}

buffer::Route Peers::route(device::LaneKind lane) {
  return {device_, lane, group_.lanes().collectives(), {staging_.data(), staging_.bytes()}};
}

void Peers::signal(device::LaneKind lane, const std::string& what, int channel, uint32_t sequence) {
  device_.signal(lane, what, first_channel_ + channel, sequence,
                 [this, channel, sequence] { board_->signal(channel, sequence); });
}

void Peers::wait_all(device::LaneKind lane, const std::string& what, int channel, uint32_t sequence) {
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer == rank()) continue;
    device_.wait_signal(lane, what, group_.rank_in_whole(peer), first_channel_ + channel, sequence,
                        [this, peer, channel, sequence] { board_->wait(peer, channel, sequence); });
  }
}

void Peers::barrier(const std::string& what) {
  ++barriers_;
  device_.signal(device::LaneKind::host, what, first_channel_ + Channel::kBarrier, barriers_,
                 [this] { group_.barrier(); });
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer == rank()) continue;
    device_.wait_signal(device::LaneKind::host, what, group_.rank_in_whole(peer),
                        first_channel_ + Channel::kBarrier, barriers_, nullptr);
  }
}

uint64_t* Peers::word(int peer, int index) const {
  return reinterpret_cast<uint64_t*>(words_->peer(peer)) + index;
}

void Peers::set_contributed(int group, uint32_t sequence, bool value) {
  *word(rank(), kWords + 2 * group + static_cast<int>(sequence % 2)) = value ? 1 : 0;
}

std::vector<int> Peers::contributors(int group, uint32_t sequence) const {
  std::vector<int> result;
  for (int peer = 0; peer < ranks(); ++peer) {
    if (!tells_ || *word(peer, kWords + 2 * group + static_cast<int>(sequence % 2)) != 0)
      result.push_back(peer);
  }
  return result;
}

std::vector<uint64_t> Peers::exchange_votes(uint32_t epoch, uint64_t vote) {
  *word(rank(), static_cast<int>(epoch % kVotes)) = vote;
  votes_->signal(0, epoch);
  if (epoch == 1) return {};
  std::vector<uint64_t> result;
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer != rank()) votes_->wait(peer, 0, epoch - 1);
    result.push_back(*word(peer, static_cast<int>((epoch - 1) % kVotes)));
  }
  return result;
}

std::vector<uint64_t> Peers::exchange_needs(uint64_t need) {
  const uint32_t number = ++needs_;
  const int index = kVotes + static_cast<int>(number % kNeeds);
  device_.announce(device::LaneKind::host, "need", {{}, {{word(rank(), index), sizeof(need)}}});
  *word(rank(), index) = need;
  device_.signal(device::LaneKind::host, "needs", first_channel_ + Channel::kNeeds, number,
                 [this, number] { votes_->signal(1, number); });
  std::vector<uint64_t> result;
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer != rank()) {
      device_.wait_signal(device::LaneKind::host, "needs", group_.rank_in_whole(peer),
                          first_channel_ + Channel::kNeeds, number,
                          [this, peer, number] { votes_->wait(peer, 1, number); });
    }
    device_.announce(device::LaneKind::host, "needs", {{{word(peer, index), sizeof(need)}}, {}});
    result.push_back(*word(peer, index));
  }
  return result;
}

// Who writes for exchange n + 2 has seen every peer signal n + 1, which it does behind its copies of n.
void Peers::exchange_scalars(const double* own, double* all) {
  using device::LaneKind;
  if (!scalars_) scalars_ = allocate(2 * sizeof(double), "numbers of a sharded model");
  const uint32_t sequence = ++scalar_exchanges_;
  const auto place = [&](int peer) { return reinterpret_cast<double*>(scalars_->peer(peer)) + sequence % 2; };
  device_.copy(LaneKind::compute, "scalar", place(rank()), own, sizeof(double));
  if (comm::Collectives* collectives = group_.lanes().collectives()) {
    device_.run(LaneKind::compute, "scalars",
                {{{place(rank()), sizeof(double)}}, {{all, ranks() * sizeof(double)}}},
                [=, shard = place(rank())] { collectives->all_gather(all, shard, sizeof(double)); });
    return;
  }
  signal(LaneKind::compute, "scalars", Channel::kScalars, sequence);
  wait_all(LaneKind::compute, "scalars", Channel::kScalars, sequence);
  for (int peer = 0; peer < ranks(); ++peer)
    device_.copy(LaneKind::compute, "scalars", all + peer, place(peer), sizeof(double));
}

void Peers::signal_published(device::LaneKind lane, uint32_t epoch) {
  const int count = static_cast<int>(groups_.size());
  for (int group = 0; group < count; ++group) {  // raised together, by the last
    device::Device::Work work;
    if (group + 1 == count) {
      work = [this, count, epoch] {
        board_->signal_all(Channel::published(0), Channel::kPerGroup, count, epoch);
      };
    }
    device_.signal(lane, "published " + groups_[static_cast<std::size_t>(group)],
                   first_channel_ + Channel::published(group), epoch, std::move(work));
  }
}

}  // namespace fsdpp::runtime
