#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdpp/device/operation.h"

namespace fsdpp::device {

/// What a simulation favours.
enum class SimPolicy {
  random,   // anything that can run; each rank's lanes and host are fast or slow
  starve,   // one lane or host (which one by seed) runs only when nothing else can
  longest,  // hosts run ahead as far as they can; then what was issued first runs last
};
inline constexpr int kSimPolicies = 3;

[[nodiscard]] const char* to_string(SimPolicy policy) noexcept;
/// Throws UsageError that lists the names there are.
[[nodiscard]] SimPolicy sim_policy_from(const std::string& name);

struct SimOptions {
  uint64_t seed = 0;
  SimPolicy policy = SimPolicy::random;
};

/// One thing that can run next.
struct SimChoice {
  int rank = -1;          // -1: nothing can
  int lane = 0;           // LaneKind; host: the rank's thread
  std::size_t index = 0;  // among the world's devices
  uint64_t stamp = 0;     // order of issue; greater is younger
};

/// Chooses by seed and policy.
class SimPicker {
 public:
  SimPicker(int ranks, SimOptions options);

  [[nodiscard]] const SimOptions& options() const noexcept { return options_; }
  /// A host that has just given a lane something goes on without looking at what else could run.
  [[nodiscard]] bool host_goes_on(int rank);
  /// One of `hosts` and `lanes`; nothing when both are empty. `current`: whose thread asks.
  [[nodiscard]] SimChoice pick(std::span<const SimChoice> hosts, std::span<const SimChoice> lanes,
                               int current);
  /// Units that the host may be ahead of the compute lane.
  [[nodiscard]] int units_ahead() const noexcept { return units_ahead_; }

 private:
  [[nodiscard]] uint64_t next() noexcept;
  [[nodiscard]] uint64_t below(uint64_t bound) noexcept { return next() % bound; }
  [[nodiscard]] bool starved(int rank, int lane) const noexcept;
  [[nodiscard]] SimChoice by_speed(std::span<const SimChoice> choices);
  [[nodiscard]] SimChoice any(std::span<const SimChoice> hosts, std::span<const SimChoice> lanes,
                              int current);

  SimOptions options_;
  uint64_t state_;
  std::vector<uint64_t> lane_share_;  // per rank: of its host's choices one in so many goes to a lane
  std::vector<uint64_t> speed_;       // per rank and lane: how often it is chosen
  int units_ahead_;
  int starved_rank_ = -1;  // -1: every rank's
  int starved_lane_ = -1;  // -1: none
};

}  // namespace fsdpp::device
