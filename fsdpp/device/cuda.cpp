#include "fsdpp/device/cuda.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <list>
#include <utility>
#include <vector>

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"
#include "fsdpp/device/cuda_check.h"
#include "fsdpp/device/cuda_delay.h"
#include "fsdpp/device/cuda_kernels.h"
#include "fsdpp/device/cuda_marks.h"
#include "fsdpp/device/cuda_memory.h"

namespace fsdpp::device {
namespace {

class CudaDevice final : public Device {
 public:
  CudaDevice(int index, CudaOptions options)
      : index_(index),
        options_(std::move(options)),
        lanes_{c10::cuda::getCurrentCUDAStream(place()), c10::cuda::getStreamFromPool(false, place()),
               c10::cuda::getStreamFromPool(false, place())},
        ahead_(static_cast<std::size_t>(options_.units_ahead)) {
    if (options_.delay_us) load_spin_kernel();
  }

  [[nodiscard]] int gpu() const noexcept override { return index_; }
  [[nodiscard]] const Kernels& kernels() const override { return cuda_kernels(); }

  Memory allocate(std::size_t bytes, std::string purpose, std::shared_ptr<Ledger> ledger) override {
    if (bytes == 0) return {};
    const c10::cuda::CUDAGuard guard(place());
    return take_cuda_memory(bytes, std::move(purpose), std::move(ledger));
  }

  Memory allocate_on_host(std::size_t bytes, std::string purpose, std::shared_ptr<Ledger> ledger) override {
    if (bytes == 0) return {};
    const c10::cuda::CUDAGuard guard(place());
    return take_pinned_memory(bytes, std::move(purpose), std::move(ledger));
  }

  void stay_near() override {
    if (capturing()) return;
    CudaEvent& oldest = ahead_[next_ahead_++ % ahead_.size()];
    oldest.synchronize();
    oldest.record(stream(LaneKind::compute).stream());
  }

 protected:
  void drain() override {
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      FSDPP_CUDA(cudaStreamSynchronize(lanes_[lane].stream()));
      marks_[lane].settle();
    }
  }

  void submit(const Operation& operation, Work work) override {
    if (operation.lane == LaneKind::host) return run_on_host(operation, work);
    const c10::cuda::CUDAStream lane = stream(operation.lane);
    if (options_.delay_us) {
      if (const int delay = options_.delay_us(operation); delay > 0) cuda_spin(lane.stream(), delay, nullptr);
    }
    join_capture(operation.lane);
    switch (operation.kind) {
      case OperationKind::record:
        marks(operation.lane).record(operation.position, lane.stream());
        return;
      case OperationKind::wait:
        if (operation.event.lane != operation.lane && operation.event.lane != LaneKind::host)
          marks(operation.event.lane)
              .make_wait(lane.stream(), static_cast<int>(operation.lane), operation.event.position);
        return;
      case OperationKind::acquire:
      case OperationKind::release:
        if (options_.poison) {
          const ByteRange& range = operation.writes.front();
          cuda_poison(lane.stream(), const_cast<void*>(range.begin), range.size);
        }
        return;
      default:
        if (!work) return;
        const c10::cuda::CUDAStreamGuard guard(lane);
        work();
    }
  }

  // Between GPUs a copy engine does it. A copy within one GPU is a kernel, also where a batch asks for the
  // copy engine: the lanes' priorities keep it from holding up GEMMs.
  void copy_bytes(const std::vector<Copy>& copies) override {
    const cudaStream_t now = c10::cuda::getCurrentCUDAStream(place()).stream();
    for (const Copy& copy : copies)
      FSDPP_CUDA(cudaMemcpyAsync(copy.target, copy.source, copy.bytes, cudaMemcpyDefault, now));
  }

  // From pageable memory the driver has taken the bytes when the call returns. A captured copy reads its
  // source again at every replay: it must stay.
  void upload_bytes(void* target, const std::vector<std::byte>& kept) override {
    const cudaStream_t now = c10::cuda::getCurrentCUDAStream(place()).stream();
    const std::vector<std::byte>& source = is_capturing(now) ? captured_.emplace_back(kept) : kept;
    FSDPP_CUDA(cudaMemcpyAsync(target, source.data(), source.size(), cudaMemcpyHostToDevice, now));
  }

  void fill_bytes(void* target, int value, std::size_t bytes) override {
    FSDPP_CUDA(cudaMemsetAsync(target, value, bytes, c10::cuda::getCurrentCUDAStream(place()).stream()));
  }

 private:
  // In a captured step a lane's first operation follows what the compute lane has come to: else it would not
  // be part of the graph.
  void join_capture(LaneKind lane) {
    if (lane == LaneKind::compute || !capturing() || is_capturing(stream(lane).stream())) return;
    fork_.record(stream(LaneKind::compute).stream());
    FSDPP_CUDA(cudaStreamWaitEvent(stream(lane).stream(), fork_.get(), 0));
  }

  [[nodiscard]] c10::DeviceIndex place() const noexcept { return static_cast<c10::DeviceIndex>(index_); }
  [[nodiscard]] c10::cuda::CUDAStream stream(LaneKind lane) const {
    return lanes_[static_cast<std::size_t>(lane)];
  }
  CudaMarks& marks(LaneKind lane) { return marks_[static_cast<std::size_t>(lane)]; }

  void run_on_host(const Operation& operation, const Work& work) {
    const bool waits = operation.kind == OperationKind::wait && operation.event.lane != LaneKind::host;
    if (waits) marks(operation.event.lane).wait_on_host(operation.event.position);
    if (work) work();
  }

  static bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    FSDPP_CUDA(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
  }
  [[nodiscard]] bool capturing() const { return is_capturing(stream(LaneKind::compute).stream()); }

  int index_;
  CudaOptions options_;
  std::array<c10::cuda::CUDAStream, 3> lanes_;
  std::array<CudaMarks, 3> marks_;
  CudaEvent fork_;
  std::list<std::vector<std::byte>> captured_;  // uploads that graphs read
  std::vector<CudaEvent> ahead_;
  std::size_t next_ahead_ = 0;
};

}  // namespace

int cuda_devices() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

static void require_gpu(int index) {
  require(index >= 0 && index < cuda_devices(), "there is no GPU ", index, ": this process sees ",
          cuda_devices(),
          " of them; start at most one rank per GPU, or check CUDA_VISIBLE_DEVICES and the driver");
}

void use_compute_stream(int index) {
  require_gpu(index);
  FSDPP_CUDA(cudaSetDevice(index));
  c10::cuda::setCurrentCUDAStream(c10::cuda::getStreamFromPool(true, static_cast<c10::DeviceIndex>(index)));
}

void use_growing_memory() {
  for (const char* theirs : {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) {
    if (std::getenv(theirs) != nullptr) return;
  }
  c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
}

std::unique_ptr<Device> make_cuda_device(int index, CudaOptions options) {
  require_gpu(index);
  require(options.units_ahead > 0, "units_ahead = ", options.units_ahead, "; expected at least 1");
  FSDPP_CUDA(cudaSetDevice(index));
  provide_gpu_kernels(cuda_kernels());
  return std::make_unique<CudaDevice>(index, std::move(options));
}

}  // namespace fsdpp::device
