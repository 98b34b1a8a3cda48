#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "fsdpp/comm/peer_group.h"

namespace fsdpp::comm {

/// Watches what a board's waits on the GPU report, in a thread of its own: nothing on a GPU can time out.
///
/// When a wait lasts longer than the group's timeout, or its peer is known to be gone, prints which rank did
/// not come on which channel, gives up on that rank, and ends this process with `exit_code`.
class CudaWatchdog {
 public:
  /// `waiting`: host memory [channels * ranks] of counters waited for (0: none). All must outlive it.
  CudaWatchdog(PeerGroup& group, const std::vector<std::string>& channels, const uint32_t* waiting,
               int exit_code);
  ~CudaWatchdog();
  CudaWatchdog(const CudaWatchdog&) = delete;
  CudaWatchdog& operator=(const CudaWatchdog&) = delete;

 private:
  void watch();
  void look();
  [[noreturn]] void end(int rank, std::size_t channel, uint32_t expected, const std::string& why);

  PeerGroup& group_;
  const std::vector<std::string>& channels_;
  const uint32_t* waiting_;
  int exit_code_;
  std::vector<uint32_t> seen_;  // as of the last look
  std::vector<int64_t> since_;  // ms that it has stood there
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace fsdpp::comm
