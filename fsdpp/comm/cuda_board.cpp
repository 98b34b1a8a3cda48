#include "fsdpp/comm/cuda_board.h"

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/cuda_signals.h"
#include "fsdpp/comm/cuda_stream_wait.h"
#include "fsdpp/comm/cuda_watchdog.h"
#include "fsdpp/device/cuda_check.h"

namespace fsdpp::comm {
namespace {

class CudaBoard final : public LaneSignals {
 public:
  CudaBoard(PeerGroup& group, int gpu, std::shared_ptr<PeerMemory> pads, std::vector<std::string> names,
            int lost_exit_code, std::function<bool(int rank)> has_left)
      : gpu_(gpu), pads_(std::move(pads)), names_(std::move(names)) {
    const std::size_t channels = names_.size();
    require(group.ranks() <= kMaxBoardRanks, "a group of ", group.ranks(), " GPUs; at most ", kMaxBoardRanks,
            " address each other: use NCCL between nodes");
    FSDPP_CUDA(cudaMalloc(&own_, channels * sizeof(uint32_t)));
    FSDPP_CUDA(cudaMemset(own_, 0, channels * sizeof(uint32_t)));
    for (int rank = 0; rank < group.ranks(); ++rank)
      view_.pads[rank] = reinterpret_cast<uint32_t*>(pads_->peer(rank));
    view_.own = own_;
    view_.rank = group.rank();
    view_.ranks = group.ranks();
    view_.channels = static_cast<int>(channels);
    FSDPP_CUDA(cudaDeviceSynchronize());
    load_signal_kernels();
    hardware_waits_ = can_stream_wait(gpu);
    if (group.ranks() > 1)
      watchdog_ = std::make_unique<CudaWatchdog>(group, names_, lost_exit_code, std::move(has_left));
  }
  ~CudaBoard() override {
    static_cast<void>(cudaDeviceSynchronize());  // no wait is left
    watchdog_.reset();
    static_cast<void>(cudaFree(own_));
  }

  void signal(int channel, uint32_t /*sequence*/) override { cuda_signal(stream(), view_, channel); }
  void signal_all(int first, int stride, int count, uint32_t /*sequence*/) override {
    cuda_signal_all(stream(), view_, first, stride, count);
  }

  void wait(int rank, int channel, uint32_t sequence) override {
    const device::Stream lane = stream();
    // A graph that runs again must compare counters; and once there is one, the host does not know their
    // values.
    const bool captured = is_capturing(lane);
    hardware_waits_ = hardware_waits_ && !captured;
    uint32_t* const stands = watchdog_ ? watchdog_->expect(rank, channel, captured) : nullptr;
    if (hardware_waits_ && stands != nullptr && sequence != 0) {
      cuda_stream_wait(lane, view_.pads[view_.rank] + rank * view_.channels + channel, sequence, stands);
    } else {
      cuda_wait(lane, view_, channel, rank, 1, stands);
    }
  }

 private:
  static bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    FSDPP_CUDA(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
  }
  [[nodiscard]] device::Stream stream() const {
    return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(gpu_)).stream();
  }

  int gpu_;
  std::shared_ptr<PeerMemory> pads_;
  std::vector<std::string> names_;
  uint32_t* own_ = nullptr;
  bool hardware_waits_ = false;
  BoardView view_;
  std::unique_ptr<CudaWatchdog> watchdog_;
};

}  // namespace

std::size_t cuda_board_bytes(int ranks, std::size_t channels) {
  return static_cast<std::size_t>(ranks) * channels * sizeof(uint32_t);
}

std::unique_ptr<LaneSignals> make_cuda_board(PeerGroup& group, int gpu, std::shared_ptr<PeerMemory> pads,
                                             std::vector<std::string> names, int lost_exit_code,
                                             std::function<bool(int rank)> has_left) {
  return std::make_unique<CudaBoard>(group, gpu, std::move(pads), std::move(names), lost_exit_code,
                                     std::move(has_left));
}

}  // namespace fsdpp::comm
