#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "fsdpp/comm/peer_group.h"

namespace fsdpp::comm {

/// While it lives, this rank is in a collective call into c10d, whose store waits without end for a server
/// that was stopped (libtorch 2.11: a wait that ran out of time asks the server to forget it). A call that
/// takes longer than the group's timeout ends the process with `exit_code`, naming a rank that is in trouble.
class Deadline {
 public:
  /// `what`: the call, for the message.
  Deadline(PeerGroup& group, std::string what, int exit_code);
  ~Deadline();
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  void watch();
  [[noreturn]] void end();

  PeerGroup& group_;
  std::string what_;
  int exit_code_;
  std::mutex mutex_;
  std::condition_variable over_;
  bool left_ = false;
  std::thread thread_;
};

}  // namespace fsdpp::comm
