#include <cuda_runtime_api.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"
#include "fsdpp/comm/c10d_store.h"
#include "fsdpp/comm/cuda_board.h"
#include "fsdpp/comm/cuda_lanes.h"
#include "fsdpp/comm/deadline.h"
#include "fsdpp/device/cuda_check.h"

namespace fsdpp::comm {
namespace {

namespace symmetric = c10d::symmetric_memory;
constexpr std::chrono::milliseconds kLastCalls(300);

/// c10d's symmetric memory: every rank's allocation is mapped here.
class SymmetricBytes final : public PeerMemory {
 public:
  SymmetricBytes(std::size_t bytes, std::vector<std::byte*> bases, at::Tensor own,
                 c10::intrusive_ptr<symmetric::SymmetricMemory> handle)
      : PeerMemory(bytes, std::move(bases)), own_(std::move(own)), handle_(std::move(handle)) {}

 private:
  at::Tensor own_;
  c10::intrusive_ptr<symmetric::SymmetricMemory> handle_;
};

class CudaPeerLanes final : public LaneTransport {
 public:
  CudaPeerLanes(PeerGroup& group, int gpu, int lost_exit_code)
      : group_(group), gpu_(gpu), c10d_(group), lost_exit_code_(lost_exit_code) {
    register_with_c10d();
  }
  ~CudaPeerLanes() override { c10d::unregister_process_group(c10d_.name()); }

  std::shared_ptr<PeerMemory> allocate(std::size_t bytes, const std::string& purpose) override {
    const at::Device place(at::kCUDA, static_cast<c10::DeviceIndex>(gpu_));
    const auto count = static_cast<int64_t>(bytes);
    require(bytes > 0, "an allocation of 0 bytes for ", purpose, " was asked for, expected at least 1");
    at::Tensor own;
    try {
      own = symmetric::empty_strided_p2p({count}, {1}, at::kByte, place, c10d_.name(), std::nullopt);
    } catch (const c10::Error& error) {
      std::size_t free = 0;
      std::size_t total = 0;
      FSDPP_CUDA(cudaMemGetInfo(&free, &total));
      throw EnvironmentError(text("no room for ", human_bytes(count), " of ", purpose, " on GPU ", gpu_, ": ",
                                  human_bytes(static_cast<int64_t>(free)), " are free (",
                                  error.what_without_backtrace(),
                                  "); use more ranks, a smaller model or batch"));
    }
    FSDPP_CUDA(cudaMemset(own.data_ptr(), 0, bytes));
    FSDPP_CUDA(cudaDeviceSynchronize());
    group_.barrier();  // who does not come is named here: c10d would wait for it without end
    c10::intrusive_ptr<symmetric::SymmetricMemory> handle;
    {
      const Deadline deadline(group_, "c10d's exchange of " + purpose, lost_exit_code_);
      handle = symmetric::rendezvous(own, c10d_.name());
    }
    FSDPP_INVARIANT(handle, "no symmetric memory for ", purpose);
    std::vector<std::byte*> bases;
    for (void* base : handle->get_buffer_ptrs())
      bases.push_back(static_cast<std::byte*>(base) + handle->get_offset());
    meet_again();  // nobody writes a peer's memory before it is zero-filled
    return std::make_shared<SymmetricBytes>(bytes, std::move(bases), std::move(own), std::move(handle));
  }

  std::unique_ptr<LaneSignals> signals(std::vector<std::string> names, const std::string& purpose) override {
    std::shared_ptr<PeerMemory> pads = allocate(cuda_board_bytes(group_.ranks(), names.size()), purpose);
    return make_cuda_board(group_, gpu_, std::move(pads), std::move(names), lost_exit_code_,
                           [this](int rank) { return c10d_.has_left(rank); });
  }

  std::unique_ptr<LaneTransport> for_part(PeerGroup& part) override {
    return make_cuda_peer_lanes(part, gpu_, lost_exit_code_);
  }
  [[nodiscard]] std::string describe() const override {
    return "GPU peers (symmetric memory, copy-engine pulls)";
  }
  [[nodiscard]] int gpu() const noexcept override { return gpu_; }

 private:
  // The first rank has the store: one that is asked to stop leaves the others time to come out of it.
  void meet_again() {
    try {
      group_.barrier();
    } catch (const Interrupted&) {
      std::this_thread::sleep_for(kLastCalls);
      throw;
    }
  }

  // rendezvous() looks its group up in c10d's registry, and asks it for ranks and store alone: no backend of
  // NCCL's, whose threads would ask the store once a second, is made.
  void register_with_c10d() {
    symmetric::set_group_info(c10d_.name(), group_.rank(), group_.ranks(), c10d_.part("symmetric"));
    whole_ = c10::make_intrusive<c10d::ProcessGroup>(c10d_.part("group"), group_.rank(), group_.ranks());
    whole_->setGroupName(c10d_.name());
    c10d::register_process_group(c10d_.name(), whole_);
  }

  PeerGroup& group_;
  int gpu_;
  C10dStore c10d_;
  c10::intrusive_ptr<c10d::ProcessGroup> whole_;  // c10d's registry does not keep it
  int lost_exit_code_;
};

}  // namespace

std::unique_ptr<LaneTransport> make_cuda_peer_lanes(PeerGroup& group, int gpu, int lost_exit_code) {
  return std::make_unique<CudaPeerLanes>(group, gpu, lost_exit_code);
}

}  // namespace fsdpp::comm
