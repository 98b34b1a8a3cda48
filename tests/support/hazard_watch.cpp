#include "tests/support/hazard_watch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <iostream>
#include <iterator>
#include <mutex>
#include <utility>

#include "fsdpp/device/host.h"
#include "fsdpp/trace/merge.h"

namespace fsdpp::test {
namespace {

std::atomic<uint64_t> total{0};

class PrintTotal final : public ::testing::Environment {
 public:
  void TearDown() override {
    if (total > 0) std::cout << "hazards: " << total << " operations checked" << std::endl;
  }
};
const ::testing::Environment* const kPrintTotal = ::testing::AddGlobalTestEnvironment(new PrintTotal);

// All ranks' operations of one sharded model, in one order.
class WatchedModel {
 public:
  explicit WatchedModel(int ranks)
      : checker_(ranks), merge_(ranks, [this](int rank, const device::Operation& operation) {
          checker_.on_operation(rank, operation);
        }) {
    for (int rank = 0; rank < ranks; ++rank) observers_.emplace_back(*this, rank);
  }
  device::Observer* observer(int rank) { return &observers_[static_cast<std::size_t>(rank)]; }

  // Fails the test for what was found; without the rules about complete traces when a rank raised.
  void conclude(bool complete) {
    check_kept();
    if (complete) {
      trace::add_blocked(checker_, merge_);
      checker_.finish();
    }
    total += checker_.operations();
    if (checker_.found() == 0) return;
    std::string report;
    for (const trace::Hazard& hazard : checker_.hazards()) report += hazard.text + "\n";
    ADD_FAILURE() << checker_.found() << " hazards in " << checker_.operations() << " operations of "
                  << checker_.ranks() << " ranks:\n"
                  << report;
  }

 private:
  struct Kept {
    uint64_t stamp;
    int rank;
    device::Operation operation;
  };
  struct RankObserver final : device::Observer {
    RankObserver(WatchedModel& model, int number) : watched(model), rank(number) {}
    void on_operation(const device::Operation& operation) override {
      // Under TSan without a lock: it would order the ranks, and no race would show.
#if defined(__SANITIZE_THREAD__)
      kept.push_back({watched.stamps_.fetch_add(1, std::memory_order_relaxed), rank, operation});
#else
      const std::lock_guard lock(watched.mutex_);
      watched.merge_.add(rank, operation);
#endif
    }
    WatchedModel& watched;
    int rank;
    std::vector<Kept> kept;
  };

  void check_kept() {
    std::vector<Kept> all;
    for (RankObserver& observer : observers_) {
      std::move(observer.kept.begin(), observer.kept.end(), std::back_inserter(all));
      observer.kept.clear();
    }
    std::sort(all.begin(), all.end(), [](const Kept& a, const Kept& b) { return a.stamp < b.stamp; });
    for (const Kept& one : all) merge_.add(one.rank, one.operation);
  }

  std::mutex mutex_;
  std::atomic<uint64_t> stamps_{0};
  trace::HazardChecker checker_;
  trace::Merge merge_;
  std::deque<RankObserver> observers_;
};

class Watch {
 public:
  explicit Watch(int ranks) : ranks_(ranks), made_(static_cast<std::size_t>(std::max(ranks, 0))) {}

  device::Observer* next(int rank) {
    const std::lock_guard lock(mutex_);
    const std::size_t number = made_.at(static_cast<std::size_t>(rank))++;
    while (models_.size() <= number) models_.emplace_back(ranks_);
    return models_[number].observer(rank);
  }
  void conclude(bool complete) {
    for (WatchedModel& model : models_) model.conclude(complete);
  }

 private:
  int ranks_;
  std::mutex mutex_;
  std::vector<std::size_t> made_;  // models per rank
  std::deque<WatchedModel> models_;
};

thread_local Watch* of_this_thread = nullptr;
std::atomic<int> replicas_asked_for{1};

// A model and the mesh that it needs as long as it lives.
struct ModelOnMesh {
  comm::MeshGroup mesh;
  std::shared_ptr<runtime::ShardedModel> model;
};

// `device`, or the host's, seen by the watch of this thread's run.
std::unique_ptr<device::Device> watched(const comm::PeerGroup& group,
                                        std::unique_ptr<device::Device> device) {
  if (of_this_thread == nullptr) {
    throw std::logic_error("watched_shard: this thread is no rank of run_watched_ranks()");
  }
  if (device == nullptr) device = std::make_unique<device::HostDevice>();
  device->observe(of_this_thread->next(group.rank()));
  return device;
}

}  // namespace

uint64_t hazards_checked() noexcept { return total; }

void watch_replicas(int replicas) noexcept { replicas_asked_for = replicas; }

void run_watched_ranks(int ranks, const std::function<void(comm::PeerGroup&)>& body,
                       std::chrono::milliseconds timeout) {
  // Made at its first use, which recompute would leave to the ranks: TSan does not see what libtorch orders.
  static_cast<void>(at::detail::getDefaultCPUGenerator());
  Watch watch(ranks);
  try {
    comm::run_thread_ranks(
        ranks,
        [&](comm::PeerGroup& group) {
          of_this_thread = &watch;  // the thread is this run's own
          body(group);
        },
        timeout);
  } catch (...) {
    watch.conclude(false);
    throw;
  }
  watch.conclude(true);
}

std::shared_ptr<runtime::ShardedModel> watched_shard(comm::PeerGroup& group,
                                                     const std::shared_ptr<torch::nn::Module>& root,
                                                     const std::vector<runtime::UnitSpec>& units,
                                                     runtime::Options options,
                                                     std::unique_ptr<device::Device> device) {
  const int replicas = replicas_asked_for;
  if (replicas == 1) return fully_shard(group, root, units, options, watched(group, std::move(device)));
  const auto both = std::make_shared<ModelOnMesh>(
      ModelOnMesh{comm::MeshGroup(group, comm::hybrid_mesh(group.ranks(), replicas)), nullptr});
  both->model = watched_shard(both->mesh, root, units, options, std::move(device));
  return {both, both->model.get()};
}

std::shared_ptr<runtime::ShardedModel> watched_shard(comm::MeshGroup& mesh,
                                                     const std::shared_ptr<torch::nn::Module>& root,
                                                     const std::vector<runtime::UnitSpec>& units,
                                                     runtime::Options options,
                                                     std::unique_ptr<device::Device> device) {
  return fully_shard(mesh, root, units, options, watched(mesh.whole(), std::move(device)));
}

}  // namespace fsdpp::test
