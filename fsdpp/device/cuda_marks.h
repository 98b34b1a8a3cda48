#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <vector>

namespace fsdpp::device {

/// A CUDA event, made when it is first recorded. Move-only, of the device that is current then.
class CudaEvent {
 public:
  CudaEvent() = default;
  ~CudaEvent();
  CudaEvent(CudaEvent&& other) noexcept;
  CudaEvent& operator=(CudaEvent&&) = delete;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(cudaStream_t stream);
  /// The host waits for the last record; at once when there was none.
  void synchronize() const;
  [[nodiscard]] cudaEvent_t get() const noexcept { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

/// The points of one lane that others may wait for: positions in its order and the CUDA events recorded
/// there.
///
/// Keeps the latest kKept. To wait for an older one is to wait for the oldest that is kept: later, never too
/// early.
class CudaMarks {
 public:
  static constexpr std::size_t kKept = 256;

  CudaMarks() : kept_(kKept) {}
  void record(uint64_t position, cudaStream_t lane);
  /// `waiter` (lane number `who`) goes on after `position`; nothing is issued when it already does.
  void make_wait(cudaStream_t waiter, int who, uint64_t position);
  /// The host waits for `position`.
  void wait_on_host(uint64_t position);
  /// The host has seen the lane empty: what was recorded counts as reached.
  void settle() noexcept { settled_ = latest_; }

 private:
  struct Mark {
    uint64_t position = 0;
    CudaEvent event;
  };

  [[nodiscard]] const Mark& kept_from(uint64_t position) const;

  std::vector<Mark> kept_;  // a ring
  std::size_t next_ = 0;
  uint64_t latest_ = 0;
  uint64_t settled_ = 0;
  std::array<uint64_t, 3> awaited_{};  // per waiting lane: the latest position that it goes on after
};

}  // namespace fsdpp::device
