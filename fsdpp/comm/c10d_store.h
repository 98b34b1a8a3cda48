#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>

#include "fsdpp/comm/peer_group.h"

namespace fsdpp::comm {

/// The store that c10d's groups among a group's ranks and their parts share; rank 0 serves it on this host.
///
/// c10d's threads may ask a store as long as their groups live, and complain when it is gone. So the rank
/// that serves it leaves last: when the others have left or are gone, or after `patience`. Declare it before
/// what uses it.
class C10dStore {
 public:
  /// Collective; `group` must outlive it.
  explicit C10dStore(PeerGroup& group, std::chrono::milliseconds patience = std::chrono::seconds(1));
  /// leave(); nobody is waited for while an exception goes by, but for an interrupt that all ranks hear.
  ~C10dStore();
  C10dStore(const C10dStore&) = delete;
  C10dStore& operator=(const C10dStore&) = delete;

  /// What is kept under names that begin so.
  [[nodiscard]] c10::intrusive_ptr<c10d::Store> part(const std::string& prefix) const;

  /// Tells the others that this rank asks no more, and waits for them as said above. Once; then at once.
  void leave() noexcept;
  /// Whether that rank (see PeerGroup::rank_in_whole) has said so.
  [[nodiscard]] bool has_left(int rank_in_whole) const;

 private:
  void tell() noexcept;
  [[nodiscard]] bool others_left() const;

  PeerGroup& group_;
  std::chrono::milliseconds patience_;
  std::unique_ptr<SignalBoard> left_;
  c10::intrusive_ptr<c10d::Store> store_;
  bool told_ = false;
};

/// Collective: a name that none of c10d's groups has, of this process or in a store that `group` shares.
[[nodiscard]] std::string new_c10d_name(PeerGroup& group);

}  // namespace fsdpp::comm
