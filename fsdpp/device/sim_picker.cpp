#include "fsdpp/device/sim_picker.h"

#include <algorithm>
#include <vector>

#include "fsdpp/base/error.h"

namespace fsdpp::device {
namespace {

constexpr int kHost = static_cast<int>(LaneKind::host);
constexpr uint64_t kStay = 8;  // a thread hands over, where it could go on, once in so many choices

}  // namespace

const char* to_string(SimPolicy policy) noexcept {
  switch (policy) {
    case SimPolicy::random:
      return "random";
    case SimPolicy::starve:
      return "starve";
    case SimPolicy::longest:
      return "longest";
  }
  return "?";
}

SimPolicy sim_policy_from(const std::string& name) {
  for (int i = 0; i < kSimPolicies; ++i) {
    if (name == to_string(static_cast<SimPolicy>(i))) return static_cast<SimPolicy>(i);
  }
  throw UsageError(text("no policy is called \"", name, "\"; there are random, starve and longest"));
}

SimPicker::SimPicker(int ranks, SimOptions options)
    : options_(options), state_(options.seed * 0x9E3779B97F4A7C15ULL + 0x632BE59BD9B4E019ULL) {
  static constexpr uint64_t kShares[] = {2, 4, 16, 64};
  static constexpr uint64_t kSpeeds[] = {1, 8, 64};
  for (int rank = 0; rank < ranks; ++rank) {
    lane_share_.push_back(kShares[below(4)]);
    for (int lane = 0; lane < kLaneKinds; ++lane) speed_.push_back(kSpeeds[below(3)]);
  }
  units_ahead_ = 1 + static_cast<int>(below(5));
  if (options_.policy != SimPolicy::starve) return;
  starved_lane_ = static_cast<int>(below(kLaneKinds));
  starved_rank_ = static_cast<int>(below(static_cast<uint64_t>(ranks) + 1)) - 1;
  if (starved_lane_ == kHost) starved_rank_ = std::max(starved_rank_, 0);
}

uint64_t SimPicker::next() noexcept {  // splitmix64
  state_ += 0x9E3779B97F4A7C15ULL;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

bool SimPicker::starved(int rank, int lane) const noexcept {
  return lane == starved_lane_ && (starved_rank_ < 0 || starved_rank_ == rank);
}

bool SimPicker::host_goes_on(int rank) {
  if (starved(rank, kHost)) return false;
  if (options_.policy == SimPolicy::longest) return below(2 * kStay) != 0;
  return below(lane_share_[static_cast<std::size_t>(rank)]) != 0;
}

SimChoice SimPicker::by_speed(std::span<const SimChoice> choices) {
  const auto speed = [&](const SimChoice& choice) {
    return speed_[static_cast<std::size_t>(choice.rank * kLaneKinds + choice.lane)];
  };
  uint64_t all = 0;
  for (const SimChoice& choice : choices) all += speed(choice);
  uint64_t at = below(std::max<uint64_t>(all, 1));
  for (const SimChoice& choice : choices) {
    if (at < speed(choice)) return choice;
    at -= speed(choice);
  }
  return {};
}

SimChoice SimPicker::any(std::span<const SimChoice> hosts, std::span<const SimChoice> lanes, int current) {
  const uint64_t share = lane_share_[static_cast<std::size_t>(current)];
  if (hosts.empty() || (!lanes.empty() && below(share) == 0)) return by_speed(lanes);
  const auto own = std::find_if(hosts.begin(), hosts.end(),
                                [current](const SimChoice& choice) { return choice.rank == current; });
  if (own != hosts.end() && below(kStay) != 0) return *own;  // threads change places at a price
  return by_speed(hosts);
}

SimChoice SimPicker::pick(std::span<const SimChoice> hosts, std::span<const SimChoice> lanes, int current) {
  switch (options_.policy) {
    case SimPolicy::random:
      break;
    case SimPolicy::starve: {
      std::vector<SimChoice> fed[2];
      for (const SimChoice& choice : hosts)
        if (!starved(choice.rank, choice.lane)) fed[0].push_back(choice);
      for (const SimChoice& choice : lanes)
        if (!starved(choice.rank, choice.lane)) fed[1].push_back(choice);
      if (!fed[0].empty() || !fed[1].empty()) return any(fed[0], fed[1], current);
      break;
    }
    case SimPolicy::longest:
      if (!hosts.empty()) return hosts[below(hosts.size())];
      if (lanes.empty() || below(kStay) == 0) break;
      return *std::max_element(lanes.begin(), lanes.end(),
                               [](const SimChoice& a, const SimChoice& b) { return a.stamp < b.stamp; });
  }
  return any(hosts, lanes, current);
}

}  // namespace fsdpp::device
