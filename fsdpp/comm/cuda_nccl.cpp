#define USE_C10D_NCCL 1
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/c10d_collectives.h"
#include "fsdpp/comm/c10d_store.h"
#include "fsdpp/comm/cuda_lanes.h"
#include "fsdpp/device/cuda_memory.h"

namespace fsdpp::comm {
namespace {

/// This rank's own memory: no peer can address it.
class OwnMemory final : public PeerMemory {
 public:
  OwnMemory(std::vector<std::byte*> bases, device::Memory own)
      : PeerMemory(own.bytes(), std::move(bases)), own_(std::move(own)) {}

 private:
  device::Memory own_;
};

class NcclLanes final : public LaneTransport {
 public:
  NcclLanes(PeerGroup& group, int gpu, std::shared_ptr<C10dStore> store)
      : group_(group), gpu_(gpu), store_(std::move(store)), name_(new_c10d_name(group)) {
    gathers_ = communicator("gather");
    reduces_ = communicator("reduce");
    collectives_ = make_c10d_collectives(group_, gpu_, gathers_, reduces_);
  }
  ~NcclLanes() override {
    for (const auto& group : {gathers_, reduces_}) {
      try {
        group->shutdown();
      } catch (const c10::Error& error) {  // of an operation that failed before, perhaps
        say_end(error.what_without_backtrace());
      } catch (const std::exception& error) {
        say_end(error.what());
      }
    }
  }

  std::shared_ptr<PeerMemory> allocate(std::size_t bytes, const std::string& purpose) override {
    require(bytes > 0, "an allocation of 0 bytes for ", purpose, " was asked for, expected at least 1");
    device::Memory own = device::take_cuda_memory(bytes, purpose, nullptr);
    std::vector<std::byte*> bases(static_cast<std::size_t>(group_.ranks()), nullptr);
    bases[static_cast<std::size_t>(group_.rank())] = own.data();
    return std::make_shared<OwnMemory>(std::move(bases), std::move(own));
  }
  std::unique_ptr<LaneSignals> signals(std::vector<std::string>, const std::string&) override {
    return std::make_unique<NoSignals>();
  }
  std::unique_ptr<LaneTransport> for_part(PeerGroup& part) override {
    return std::make_unique<NcclLanes>(part, gpu_, store_);
  }
  void leave() noexcept override { store_->leave(); }
  Collectives* collectives() noexcept override { return collectives_.get(); }
  [[nodiscard]] std::string describe() const override {
    return "NCCL collectives (GPUs that cannot address each other, or as asked for)";
  }
  [[nodiscard]] int gpu() const noexcept override { return gpu_; }

 private:
  void say_end(const char* what) const {
    std::fprintf(stderr, "fsdpp: rank %d: the end of NCCL's group %s: %s\n", group_.rank(), name_.c_str(),
                 what);
  }
  // One for each direction, so that a gather may overlap a reduce.
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> communicator(const std::string& purpose) {
    auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
    options->timeout = group_.timeout();
    return c10::make_intrusive<c10d::ProcessGroupNCCL>(store_->part(text(name_, "/", purpose)), group_.rank(),
                                                       group_.ranks(), options);
  }

  PeerGroup& group_;
  int gpu_;
  std::shared_ptr<C10dStore> store_;
  std::string name_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> gathers_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> reduces_;
  std::unique_ptr<Collectives> collectives_;  // through both
};

}  // namespace

std::unique_ptr<LaneTransport> make_nccl_lanes(PeerGroup& group, int gpu) {
  return std::make_unique<NcclLanes>(group, gpu, std::make_shared<C10dStore>(group));
}

}  // namespace fsdpp::comm
