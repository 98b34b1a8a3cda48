#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fsdpp/comm/cuda_stream_wait.h"
#include "fsdpp/comm/peer_group.h"

namespace fsdpp::comm {

/// Watches the waits of a GPU's lanes from a thread of the host: nothing on a GPU can time out.
///
/// When a lane stands in one wait for the group's timeout, or its peer is known to be gone, prints which rank
/// did not come on which channel, gives up on that rank, and ends this process with `exit_code`; after SIGINT
/// or SIGTERM (see interrupted()) silently, with 128 plus the signal, also as soon as the peer has left.
///
/// It calls nothing of CUDA's meanwhile: lanes show where they stand in host memory. (A copy from the device
/// can be held up behind the very wait that it should tell about.)
class CudaWatchdog {
 public:
  /// All must outlive it. Throws EnvironmentError when there is no pinned memory.
  CudaWatchdog(PeerGroup& group, const std::vector<std::string>& channels, int exit_code,
               std::function<bool(int rank)> has_left);
  ~CudaWatchdog();
  CudaWatchdog(const CudaWatchdog&) = delete;
  CudaWatchdog& operator=(const CudaWatchdog&) = delete;

  /// What `lane` shall show around its next wait, which is for `rank` to reach `sequence` on `channel`.
  struct Ticket {
    WaitMarks marks;
    uint32_t number;
  };
  [[nodiscard]] Ticket expect(device::Stream lane, int rank, int channel, uint32_t sequence);

 private:
  static constexpr std::size_t kMostLanes = 8;
  static constexpr std::size_t kKept =
      4096;  // waits of a lane that are remembered: more than are ever enqueued

  struct Wait {
    int rank;
    int channel;
    uint32_t sequence;
  };
  struct Lane {
    device::Stream stream = nullptr;
    std::vector<Wait> waits;  // by number modulo kKept
    uint32_t issued = 0;
    uint32_t last = 0;  // the wait in which it stood at the last look
    int64_t since = 0;  // ms that it has stood there
  };

  void watch();
  void look(std::size_t index, Lane& lane);
  [[nodiscard]] WaitMarks marks(std::size_t lane) const { return {shown_ + 2 * lane, shown_ + 2 * lane + 1}; }
  [[noreturn]] void end(const Wait& wait, const std::string& why);

  PeerGroup& group_;
  const std::vector<std::string>& channels_;
  int exit_code_;
  std::function<bool(int rank)> has_left_;
  uint32_t* shown_ = nullptr;  // pinned: two marks per lane
  std::mutex mutex_;
  std::array<Lane, kMostLanes> lanes_;
  std::size_t lane_count_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace fsdpp::comm
