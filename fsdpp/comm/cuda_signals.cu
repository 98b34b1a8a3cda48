#include "fsdpp/base/error.h"
#include "fsdpp/comm/cuda_signals.h"
#include "fsdpp/device/cuda_check.h"

namespace fsdpp::comm {
namespace {

constexpr int kWarp = 32;              // one warp: lane r handles rank r
constexpr int kEagerPolls = 32;        // before the first sleep
constexpr unsigned kLongestNap = 256;  // ns; a signal is seen at most this much late

__device__ __forceinline__ void store_release(uint32_t* target, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(target), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* source) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

__device__ void wait_for_counter(const uint32_t* counter, uint32_t expected) {
  unsigned nap = 32;
  for (int poll = 1;; ++poll) {
    if (static_cast<int32_t>(load_acquire(counter) - expected) >= 0) return;
    if (poll > kEagerPolls) {
      __nanosleep(nap);
      if (nap < kLongestNap) nap *= 2;
    }
  }
}

// One block per channel.
__global__ void signal_kernel(const __grid_constant__ BoardView board, int first, int stride) {
  const int peer = static_cast<int>(threadIdx.x);
  const int channel = first + static_cast<int>(blockIdx.x) * stride;
  const uint32_t number = board.own[channel] + 1;
  __syncwarp();  // all have read before one writes
  if (peer == 0) board.own[channel] = number;
  // Earlier kernels' writes, ours by the stream's order, must reach the system before the counter does.
  __threadfence_system();
  if (peer < board.ranks && peer != board.rank) {
    store_release(board.pads[peer] + static_cast<int64_t>(board.rank) * board.channels + channel, number);
  }
}

__global__ void wait_kernel(const __grid_constant__ BoardView board, int channel, int first, int count,
                            uint32_t* stands) {
  const int peer = static_cast<int>(threadIdx.x);
  const bool shows = peer == 0 && stands != nullptr;
  if (shows) *const_cast<volatile uint32_t*>(stands) = max(board.own[channel], 1U);
  __syncwarp();
  if (peer >= first && peer < first + count && peer != board.rank) {
    wait_for_counter(board.pads[board.rank] + static_cast<int64_t>(peer) * board.channels + channel,
                     board.own[channel]);
  }
  __syncwarp();
  if (shows) *const_cast<volatile uint32_t*>(stands) = 0;
  __threadfence_system();
}

void require_channel(const BoardView& board, int channel) {
  FSDPP_INVARIANT(
      board.ranks >= 1 && board.ranks <= kMaxBoardRanks && board.rank >= 0 && board.rank < board.ranks,
      "board of rank ", board.rank, " of ", board.ranks);
  require(channel >= 0 && channel < board.channels, "signals: channel ", channel, "; expected 0 to ",
          board.channels - 1);
}

void require_ranks(const BoardView& board, int first, int count) {
  require(first >= 0 && count >= 0 && count <= board.ranks - first, "signals: ranks from ", first, ", ",
          count, " of them; expected some of the board's ", board.ranks);
}

}  // namespace

void cuda_signal(device::Stream stream, const BoardView& board, int channel) {
  require_channel(board, channel);
  signal_kernel<<<1, kWarp, 0, stream>>>(board, channel, /*stride=*/0);
  FSDPP_CUDA(cudaGetLastError());
}

void cuda_signal_all(device::Stream stream, const BoardView& board, int first, int stride, int count) {
  if (count == 0) return;
  require_channel(board, first);
  require_channel(board, first + (count - 1) * stride);
  signal_kernel<<<static_cast<unsigned>(count), kWarp, 0, stream>>>(board, first, stride);
  FSDPP_CUDA(cudaGetLastError());
}

void cuda_wait(device::Stream stream, const BoardView& board, int channel, int first_rank, int count,
               uint32_t* stands) {
  require_channel(board, channel);
  require_ranks(board, first_rank, count);
  wait_kernel<<<1, kWarp, 0, stream>>>(board, channel, first_rank, count, stands);
  FSDPP_CUDA(cudaGetLastError());
}

void load_signal_kernels() {
  cudaFuncAttributes attributes{};
  FSDPP_CUDA(cudaFuncGetAttributes(&attributes, signal_kernel));
  FSDPP_CUDA(cudaFuncGetAttributes(&attributes, wait_kernel));
}

}  // namespace fsdpp::comm
