#include "fsdpp/runtime/peers.h"

#include <utility>

namespace fsdpp::runtime {
namespace {

std::vector<std::string> channel_names(const std::vector<std::string>& groups) {
  std::vector<std::string> names = {"released"};
  for (const std::string& group : groups) {
    for (const char* what : {"published ", "ready ", "reduced ", "pulled "}) names.push_back(what + group);
  }
  return names;
}

}  // namespace

Peers::Peers(comm::PeerGroup& group, device::Device& device, const std::vector<std::string>& groups)
    : group_(group),
      device_(device),
      board_(group.signals(channel_names(groups), "signals of a sharded model")),
      words_(group.allocate((2 + 2 * groups.size()) * sizeof(uint64_t), "words of a sharded model")) {}

void Peers::signal(device::LaneKind lane, const std::string& what, int channel, uint32_t sequence) {
  device_.signal(lane, what, channel, sequence,
                 [this, channel, sequence] { board_->signal(channel, sequence); });
}

void Peers::wait(device::LaneKind lane, const std::string& what, int peer, int channel, uint32_t sequence) {
  device_.wait_signal(lane, what, peer, channel, sequence,
                      [this, peer, channel, sequence] { board_->wait(peer, channel, sequence); });
}

void Peers::wait_all(device::LaneKind lane, const std::string& what, int channel, uint32_t sequence) {
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer != rank()) wait(lane, what, peer, channel, sequence);
  }
}

uint64_t* Peers::word(int peer, int index) const {
  return reinterpret_cast<uint64_t*>(words_->peer(peer)) + index;
}

void Peers::set_contributed(int group, uint32_t sequence, bool value) {
  *word(rank(), 2 + 2 * group + static_cast<int>(sequence % 2)) = value ? 1 : 0;
}

bool Peers::contributed(int peer, int group, uint32_t sequence) const {
  return *word(peer, 2 + 2 * group + static_cast<int>(sequence % 2)) != 0;
}

void Peers::set_vote(uint32_t epoch, uint64_t vote) { *word(rank(), static_cast<int>(epoch % 2)) = vote; }

uint64_t Peers::vote(int peer, uint32_t epoch) const { return *word(peer, static_cast<int>(epoch % 2)); }

}  // namespace fsdpp::runtime
