#include "fsdpp/comm/c10d_collectives.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <utility>
#include <vector>

#include "fsdpp/base/error.h"

namespace fsdpp::comm {
namespace {

void require_ranks(const PeerGroup& group, const c10d::Backend& backend) {
  require(backend.getRank() == group.rank() && backend.getSize() == group.ranks(), "c10d backend ",
          backend.getBackendName(), " is rank ", backend.getRank(), " of ", backend.getSize(),
          ", but this is rank ", group.rank(), " of ", group.ranks(), " of group \"", group.name(),
          "\": give a backend of the group's ranks in the group's order");
}

class C10dCollectives final : public Collectives {
 public:
  C10dCollectives(PeerGroup& group, int gpu, c10::intrusive_ptr<c10d::Backend> gathers,
                  c10::intrusive_ptr<c10d::Backend> reduces)
      : group_(group), gpu_(gpu), gathers_(std::move(gathers)), reduces_(std::move(reduces)) {
    require_ranks(group_, *gathers_);
    require_ranks(group_, *reduces_);
  }

  void all_gather(void* full, const void* shard, std::size_t bytes) override {
    const auto count = static_cast<int64_t>(bytes);
    at::Tensor out = over(full, count * group_.ranks(), at::kByte);
    at::Tensor in = over(shard, count, at::kByte);
    if (apart_from(in, out)) in = in.clone();
    run("all_gather", *gathers_, [&] { return gathers_->_allgather_base(out, in); });
  }
  void reduce_scatter(float* shard, const float* full, int64_t count) override {
    at::Tensor out = over(shard, count, at::kFloat);
    at::Tensor in = over(full, count * group_.ranks(), at::kFloat);
    at::Tensor sum = apart_from(out, in) ? at::empty_like(out) : out;
    run("reduce_scatter", *reduces_, [&] { return reduces_->_reduce_scatter_base(sum, in); });
    if (!sum.is_same(out)) out.copy_(sum);
  }

 private:
  [[nodiscard]] at::Tensor over(const void* data, int64_t count, at::ScalarType dtype) const {
    const at::Device place =
        gpu_ < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu_));
    return at::from_blob(const_cast<void*>(data), {count}, at::TensorOptions(place).dtype(dtype));
  }
  // A shard in its place of the whole is what NCCL likes and MPI forbids.
  [[nodiscard]] bool apart_from(const at::Tensor& shard, const at::Tensor& full) const {
    const auto* begin = static_cast<const std::byte*>(full.const_data_ptr());
    const auto* data = static_cast<const std::byte*>(shard.const_data_ptr());
    return gpu_ < 0 && data >= begin && data < begin + full.nbytes();
  }

  template <class Start>
  void run(const char* what, const c10d::Backend& backend, const Start& start) {
    ++sequence_;
    std::string why = "it was aborted";
    try {
      // A GPU's lane waits, not the host: with a timeout the host would.
      if (start()->wait(gpu_ < 0 ? group_.timeout() : kNoTimeout)) return;
    } catch (const c10::Error& error) {
      why = error.what_without_backtrace();
    } catch (const std::exception& error) {
      why = error.what();
    }
    fail(text(what, " ", sequence_, " of rank ", group_.rank_in_whole(group_.rank()), " of group \"",
              group_.name(), "\" through c10d's ", backend.getBackendName(), " failed: ", why));
  }
  // c10d does not say whom it waited for; the group may know.
  [[noreturn]] void fail(const std::string& what) const {
    for (int peer = 0; peer < group_.ranks(); ++peer) {
      if (peer == group_.rank()) continue;
      const std::optional<Trouble> trouble = group_.trouble_with(peer);
      const int named = group_.rank_in_whole(peer);
      if (trouble)
        throw PeerError(text("lost rank ", named, ": ", trouble->what, "; ", what), named, group_.name(),
                        sequence_);
    }
    throw EnvironmentError(what);
  }

  PeerGroup& group_;
  int gpu_;
  c10::intrusive_ptr<c10d::Backend> gathers_;
  c10::intrusive_ptr<c10d::Backend> reduces_;
  uint64_t sequence_ = 0;  // of the calls so far
};

/// What a rank sees of memory that no peer is to address.
class OwnPart final : public PeerMemory {
 public:
  OwnPart(std::shared_ptr<PeerMemory> whole, int rank, int ranks)
      : PeerMemory(whole->bytes(), own(*whole, rank, ranks)), whole_(std::move(whole)) {}

 private:
  static std::vector<std::byte*> own(const PeerMemory& whole, int rank, int ranks) {
    std::vector<std::byte*> bases(static_cast<std::size_t>(ranks), nullptr);
    bases[static_cast<std::size_t>(rank)] = whole.peer(rank);
    return bases;
  }
  std::shared_ptr<PeerMemory> whole_;
};

/// Lanes as they were, whose bytes go through collectives.
class CollectiveLanes final : public LaneTransport {
 public:
  CollectiveLanes(PeerGroup& group, std::unique_ptr<LaneTransport> before,
                  std::unique_ptr<Collectives> collectives, std::string name)
      : group_(group),
        before_(std::move(before)),
        collectives_(std::move(collectives)),
        name_(std::move(name)) {}

  std::shared_ptr<PeerMemory> allocate(std::size_t bytes, const std::string& purpose) override {
    return std::make_shared<OwnPart>(before_->allocate(bytes, purpose), group_.rank(), group_.ranks());
  }
  std::unique_ptr<LaneSignals> signals(std::vector<std::string>, const std::string&) override {
    return std::make_unique<NoSignals>();
  }
  // The backend is the whole group's alone.
  std::unique_ptr<LaneTransport> for_part(PeerGroup& part) override { return before_->for_part(part); }
  void leave() noexcept override { before_->leave(); }
  Collectives* collectives() noexcept override { return collectives_.get(); }
  [[nodiscard]] std::string describe() const override { return name_; }
  [[nodiscard]] int gpu() const noexcept override { return before_->gpu(); }

 private:
  PeerGroup& group_;
  std::unique_ptr<LaneTransport> before_;
  std::unique_ptr<Collectives> collectives_;
  std::string name_;
};

}  // namespace

std::unique_ptr<Collectives> make_c10d_collectives(PeerGroup& group, int gpu,
                                                   c10::intrusive_ptr<c10d::Backend> gathers,
                                                   c10::intrusive_ptr<c10d::Backend> reduces) {
  return std::make_unique<C10dCollectives>(group, gpu, std::move(gathers), std::move(reduces));
}

void use_c10d(PeerGroup& group, const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto collectives = make_c10d_collectives(group, group.lanes().gpu(), backend, backend);
  group.set_lanes(std::make_unique<CollectiveLanes>(group, group.take_lanes(), std::move(collectives),
                                                    text("c10d's ", backend->getBackendName())));
}

}  // namespace fsdpp::comm
