#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fsdpp/comm/peer_group.h"

namespace fsdpp::comm {

/// Watches the waits of a GPU's lanes from a thread of the host: nothing on a GPU can time out.
///
/// When a lane stands in one wait for the group's timeout, or its peer is known to be gone, prints which rank
/// did not come on which channel, gives up on that rank, and ends this process with `exit_code`; after SIGINT
/// or SIGTERM (see interrupted()) silently, with 128 plus the signal, also where the peer has left.
///
/// It calls nothing of CUDA's meanwhile: waits show in host memory that they stand. (A copy from the device
/// can be held up behind the very wait that it should tell about.)
class CudaWatchdog {
 public:
  /// All must outlive it. `has_left`: whether that rank of the group ends in order. Throws EnvironmentError
  /// when there is no pinned memory.
  CudaWatchdog(PeerGroup& group, const std::vector<std::string>& channels, int exit_code,
               std::function<bool(int rank)> has_left);
  ~CudaWatchdog();
  CudaWatchdog(const CudaWatchdog&) = delete;
  CudaWatchdog& operator=(const CudaWatchdog&) = delete;

  /// The word in which a wait for `rank` on `channel` shows that it stands: the number that it waits for,
  /// else 0. `captured`: a graph's wait, which comes again and again and keeps its word; another's word
  /// serves a later wait. Null when graphs have used up all there are: such a wait is not watched, which is
  /// said on standard error, once.
  [[nodiscard]] uint32_t* expect(int rank, int channel, bool captured);

 private:
  static constexpr std::size_t kEager = 1 << 14;     // more waits than are ever enqueued
  static constexpr std::size_t kCaptured = 1 << 14;  // of all graphs

  struct Wait {
    int rank = 0;
    int channel = 0;
    uint32_t last = 0;  // what its word was at the last look
    int64_t since = 0;  // ms that it has stood there
  };

  void watch();
  void look(std::size_t index);
  [[noreturn]] void end(const Wait& wait, const std::string& why);

  PeerGroup& group_;
  const std::vector<std::string>& channels_;
  int exit_code_;
  std::function<bool(int rank)> has_left_;
  uint32_t* words_ = nullptr;  // pinned; the eager waits' and then the captured ones'
  std::mutex mutex_;
  std::vector<Wait> waits_;  // of the words
  std::size_t eager_ = 0;    // so far
  std::size_t captured_ = 0;
  bool said_ = false;  // that there are no more words
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace fsdpp::comm
