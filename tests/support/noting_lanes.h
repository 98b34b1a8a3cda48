#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/lanes.h"
#include "fsdpp/comm/peer_group.h"

namespace fsdpp::test {

/// What each rank asked for, in order.
class Asked {
 public:
  void add(int rank, const std::string& what) {
    const std::lock_guard lock(mutex_);
    of_[rank].push_back(what);
  }
  [[nodiscard]] std::vector<std::string> of(int rank) {
    const std::lock_guard lock(mutex_);
    return of_[rank];
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<std::string>> of_;
};

/// The host's lanes, and a note of each allocation.
class NotingLanes final : public comm::LaneTransport {
 public:
  NotingLanes(comm::PeerGroup& group, Asked& asked, int rank) : group_(group), asked_(asked), rank_(rank) {}

  std::shared_ptr<comm::PeerMemory> allocate(std::size_t bytes, const std::string& purpose) override {
    asked_.add(rank_, text(bytes, " for ", purpose));
    return group_.allocate(bytes, purpose);
  }
  std::unique_ptr<comm::LaneSignals> signals(std::vector<std::string> names,
                                             const std::string& purpose) override {
    asked_.add(rank_, "signals for " + purpose);
    return group_.signals(std::move(names), purpose);
  }
  std::unique_ptr<comm::LaneTransport> for_part(comm::PeerGroup& part) override {
    return std::make_unique<NotingLanes>(part, asked_, rank_);
  }
  [[nodiscard]] std::string describe() const override { return group_.describe(); }

 private:
  comm::PeerGroup& group_;
  Asked& asked_;
  int rank_;
};

}  // namespace fsdpp::test
