#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>

#include "fsdpp/comm/peer_group.h"

namespace fsdpp::comm {

/// What c10d wants of a group of ours before it serves it: a store, and a name that no other group of the
/// process has. Rank 0 serves the store on this host.
///
/// c10d's threads ask the store about once a second while one of its groups lives, and complain when it is
/// gone. So the rank that serves it leaves last: its destructor returns when the others' have run, or they
/// are gone, or after `patience`. Declare it before what uses it.
class C10dStore {
 public:
  /// Collective; `group` must outlive it.
  explicit C10dStore(PeerGroup& group, std::chrono::milliseconds patience = std::chrono::seconds(1));
  ~C10dStore();
  C10dStore(const C10dStore&) = delete;
  C10dStore& operator=(const C10dStore&) = delete;

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// One that starts with nothing in it, for a user of this name.
  [[nodiscard]] c10::intrusive_ptr<c10d::Store> part(const std::string& user) const;
  /// Whether `rank` has begun to take its store apart: it does nothing for the group any more.
  [[nodiscard]] bool has_left(int rank) const { return left_->value(rank, 0) > 0; }

 private:
  [[nodiscard]] bool others_left() const;

  PeerGroup& group_;
  std::chrono::milliseconds patience_;
  std::unique_ptr<SignalBoard> left_;
  std::string name_;
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace fsdpp::comm
