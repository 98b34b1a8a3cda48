#include "fsdpp/device/cuda_marks.h"

#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/device/cuda_check.h"

namespace fsdpp::device {

CudaEvent::~CudaEvent() {
  if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));
}

CudaEvent::CudaEvent(CudaEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}

void CudaEvent::record(cudaStream_t stream) {
  if (event_ == nullptr) FSDPP_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  FSDPP_CUDA(cudaEventRecord(event_, stream));
}

void CudaEvent::synchronize() const {
  if (event_ != nullptr) FSDPP_CUDA(cudaEventSynchronize(event_));
}

void CudaMarks::record(uint64_t position, cudaStream_t lane) {
  Mark& mark = kept_[next_++ % kKept];
  mark.position = position;
  mark.event.record(lane);
  latest_ = position;
}

// The earliest one that is not before `position`.
const CudaMarks::Mark& CudaMarks::kept_from(uint64_t position) const {
  const Mark* chosen = nullptr;
  for (std::size_t back = 1; back <= kKept && back <= next_; ++back) {
    const Mark& mark = kept_[(next_ - back) % kKept];
    if (mark.position < position) break;
    chosen = &mark;
  }
  FSDPP_INVARIANT(chosen != nullptr, "a wait for position ", position, ", which was never recorded");
  return *chosen;
}

void CudaMarks::make_wait(cudaStream_t waiter, int who, uint64_t position) {
  uint64_t& awaited = awaited_[static_cast<std::size_t>(who)];
  if (position <= settled_ || position <= awaited) return;
  const Mark& mark = kept_from(position);
  FSDPP_CUDA(cudaStreamWaitEvent(waiter, mark.event.get(), 0));
  awaited = mark.position;
}

void CudaMarks::wait_on_host(uint64_t position) {
  if (position <= settled_) return;
  const Mark& mark = kept_from(position);
  mark.event.synchronize();
  settled_ = mark.position;
}

}  // namespace fsdpp::device
