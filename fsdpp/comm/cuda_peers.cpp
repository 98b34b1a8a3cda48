#include <cuda_runtime_api.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <memory>
#include <string>
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
  CudaPeerLanes(PeerGroup& group, int gpu, int lost_exit_code, std::shared_ptr<C10dStore> store)
      : group_(group),
        gpu_(gpu),
        store_(std::move(store)),
        name_(new_c10d_name(group)),
        lost_exit_code_(lost_exit_code) {
    register_with_c10d();
  }
  ~CudaPeerLanes() override { c10d::unregister_process_group(name_); }

  std::shared_ptr<PeerMemory> allocate(std::size_t bytes, const std::string& purpose) override {
    const at::Device place(at::kCUDA, static_cast<c10::DeviceIndex>(gpu_));
    const auto count = static_cast<int64_t>(bytes);
    require(bytes > 0, "an allocation of 0 bytes for ", purpose, " was asked for, expected at least 1");
    at::Tensor own;
    try {
      own = symmetric::empty_strided_p2p({count}, {1}, at::kByte, place, name_, std::nullopt);
    } catch (const c10::Error& error) {
      std::size_t free = 0;
      std::size_t total = 0;
      FSDPP_CUDA(cudaMemGetInfo(&free, &total));
      throw NoRoomError(text("no room for ", human_bytes(count), " of ", purpose, " on GPU ", gpu_, ": ",
                             human_bytes(static_cast<int64_t>(free)), " are free (",
                             error.what_without_backtrace(), "); use more ranks, a smaller model or batch"));
    }
    FSDPP_CUDA(cudaMemset(own.data_ptr(), 0, bytes));
    FSDPP_CUDA(cudaDeviceSynchronize());
    group_.barrier();  // who does not come is named here: c10d would wait for it without end
    c10::intrusive_ptr<symmetric::SymmetricMemory> handle;
    {
      const Deadline deadline(group_, "c10d's exchange of " + purpose, lost_exit_code_);
      handle = symmetric::rendezvous(own, name_);
    }
    FSDPP_INVARIANT(handle, "no symmetric memory for ", purpose);
    std::vector<std::byte*> bases;
    for (void* base : handle->get_buffer_ptrs())
      bases.push_back(static_cast<std::byte*>(base) + handle->get_offset());
    group_.barrier();  // nobody writes a peer's memory before it is zero-filled
    return std::make_shared<SymmetricBytes>(bytes, std::move(bases), std::move(own), std::move(handle));
  }

  std::unique_ptr<LaneSignals> signals(std::vector<std::string> names, const std::string& purpose) override {
    std::shared_ptr<PeerMemory> pads = allocate(cuda_board_bytes(group_.ranks(), names.size()), purpose);
    return make_cuda_board(group_, gpu_, std::move(pads), std::move(names), lost_exit_code_,
                           [this](int rank) { return store_->has_left(group_.rank_in_whole(rank)); });
  }

  std::unique_ptr<LaneTransport> for_part(PeerGroup& part) override {
    return std::make_unique<CudaPeerLanes>(part, gpu_, lost_exit_code_, store_);
  }
  void leave() noexcept override { store_->leave(); }
  [[nodiscard]] std::string describe() const override {
    return "GPU peers (symmetric memory, copy-engine pulls)";
  }
  [[nodiscard]] int gpu() const noexcept override { return gpu_; }

 private:
  // rendezvous() looks its group up in c10d's registry, and asks it for ranks and store alone: no backend of
  // NCCL's, whose threads would ask the store once a second, is made.
  void register_with_c10d() {
    whole_ = c10::make_intrusive<c10d::ProcessGroup>(store_->part(name_), group_.rank(), group_.ranks());
    whole_->setGroupName(name_);
    c10d::register_process_group(name_, whole_);
  }

  PeerGroup& group_;
  int gpu_;
  std::shared_ptr<C10dStore> store_;
  std::string name_;
  c10::intrusive_ptr<c10d::ProcessGroup> whole_;  // c10d's registry does not keep it
  int lost_exit_code_;
};

}  // namespace

std::unique_ptr<LaneTransport> make_cuda_peer_lanes(PeerGroup& group, int gpu, int lost_exit_code) {
  return std::make_unique<CudaPeerLanes>(group, gpu, lost_exit_code, std::make_shared<C10dStore>(group));
}

}  // namespace fsdpp::comm
