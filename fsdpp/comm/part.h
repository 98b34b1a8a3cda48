#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fsdpp/comm/backend.h"

namespace fsdpp::comm {

/// `memory` of a whole group as some of its ranks see it: peer(i) is that of rank members[i].
[[nodiscard]] std::shared_ptr<PeerMemory> part_of(std::shared_ptr<PeerMemory> memory,
                                                  const std::vector<int>& members);

/// Some ranks of a group, through the backend of the whole: what they allocate, all ranks of the whole do.
class PartBackend final : public PeerBackend {
 public:
  /// `members`: increasing ranks of `whole`, which outlives this, its own rank among them. Throws UsageError
  /// otherwise.
  PartBackend(PeerBackend& whole, std::vector<int> members);

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int ranks() const noexcept override { return static_cast<int>(members_.size()); }
  [[nodiscard]] std::string describe() const override { return whole_.describe(); }
  [[nodiscard]] int rank_in_whole(int rank) const noexcept override {
    return whole_.rank_in_whole(members_[static_cast<std::size_t>(rank)]);
  }
  [[nodiscard]] std::shared_ptr<PeerMemory> allocate(std::size_t bytes, const std::string& purpose,
                                                     std::chrono::milliseconds timeout) override {
    return part_of(whole_.allocate(bytes, purpose, timeout), members_);
  }
  [[nodiscard]] std::optional<Trouble> trouble_with(int rank) const override {
    return whole_.trouble_with(members_.at(static_cast<std::size_t>(rank)));
  }
  void give_up_on(int rank) noexcept override { whole_.give_up_on(members_[static_cast<std::size_t>(rank)]); }
  void before_wait(const std::function<bool()>& reached, const std::string& what) override {
    whole_.before_wait(reached, what);
  }

 private:
  PeerBackend& whole_;
  std::vector<int> members_;
  int rank_ = 0;
};

}  // namespace fsdpp::comm
