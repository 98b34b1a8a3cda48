#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "fsdpp/comm/peer_group.h"

namespace fsdpp::comm {

/// Watches the waits of a GPU's lanes from a thread of the host: nothing on a GPU can time out.
///
/// When a wait is not satisfied within the group's timeout after it was enqueued, or its peer is known to be
/// gone, prints which rank did not come on which channel, gives up on that rank, and ends this process with
/// `exit_code`; after SIGINT or SIGTERM (see interrupted()) silently, with 128 plus the signal.
class CudaWatchdog {
 public:
  /// `pad`: this GPU's counters [ranks][channels], read a few times a second. All must outlive it.
  CudaWatchdog(PeerGroup& group, int gpu, const std::vector<std::string>& channels, const uint32_t* pad,
               int exit_code);
  ~CudaWatchdog();
  CudaWatchdog(const CudaWatchdog&) = delete;
  CudaWatchdog& operator=(const CudaWatchdog&) = delete;

  /// A lane will wait for `rank` to reach `sequence` on `channel`.
  void expect(int rank, int channel, uint32_t sequence) {
    expected_[static_cast<std::size_t>(rank) * channels_.size() + static_cast<std::size_t>(channel)].store(
        sequence, std::memory_order_relaxed);
  }

 private:
  void watch();
  void look(const uint32_t* now);
  [[noreturn]] void end(int rank, std::size_t channel, uint32_t expected, uint32_t seen,
                        const std::string& why);

  PeerGroup& group_;
  int gpu_;
  const std::vector<std::string>& channels_;
  const uint32_t* pad_;
  int exit_code_;
  std::vector<std::atomic<uint32_t>> expected_;  // [ranks][channels]
  std::vector<uint32_t> last_;                   // what was expected at the last look
  std::vector<int64_t> since_;                   // ms that it has not come
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace fsdpp::comm
