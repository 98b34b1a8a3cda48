#pragma once

#include <cstdint>

struct CUevent_st;

namespace fsdpp::device {

/// Time between two points of the stream that is current.
class CudaStopwatch {
 public:
  CudaStopwatch();
  ~CudaStopwatch();
  CudaStopwatch(const CudaStopwatch&) = delete;
  CudaStopwatch& operator=(const CudaStopwatch&) = delete;

  void start();
  void stop();
  /// Waits until the stream has come to stop(); milliseconds.
  [[nodiscard]] double milliseconds() const;

 private:
  CUevent_st* first_ = nullptr;
  CUevent_st* last_ = nullptr;
};

/// Memory of the current GPU, in bytes.
struct CudaMemory {
  int64_t taken = 0;      // by everybody, as the driver sees it
  int64_t allocated = 0;  // most that libtorch's allocator had given out since the last reset
  int64_t reserved = 0;   // most that libtorch's allocator held
};
[[nodiscard]] CudaMemory cuda_memory();
/// Gives back what libtorch's allocator keeps for later, and forgets its peaks.
void cuda_reset_memory();
/// The host waits for everything on the current GPU.
void cuda_synchronize();

}  // namespace fsdpp::device
