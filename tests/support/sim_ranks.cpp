#include "tests/support/sim_ranks.h"

#include <chrono>
#include <exception>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "fsdpp/base/error.h"

namespace fsdpp::test {
namespace {

using device::SimWorld;

// One part per rank.
struct Region {
  explicit Region(std::size_t ranks) : parts(ranks) {}
  std::vector<std::byte*> parts;
  int asked = 0;
};

class RegionMemory final : public comm::PeerMemory {
 public:
  RegionMemory(std::size_t bytes, std::shared_ptr<Region> region)
      : PeerMemory(bytes, bases(*region)), region_(std::move(region)) {}

 private:
  static std::vector<std::byte*> bases(const Region& region) { return region.parts; }
  std::shared_ptr<Region> region_;
};

// Collective allocations that have begun, by number. Belongs to the rank whose turn it is.
using Meeting = std::map<uint64_t, std::shared_ptr<Region>>;

class SimBackend final : public comm::PeerBackend {
 public:
  SimBackend(SimWorld& world, Meeting& meeting, int rank) : world_(world), meeting_(meeting), rank_(rank) {}

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int ranks() const noexcept override { return world_.ranks(); }
  [[nodiscard]] std::string describe() const override { return "simulated threads"; }

  [[nodiscard]] std::shared_ptr<comm::PeerMemory> allocate(std::size_t bytes, const std::string& purpose,
                                                           std::chrono::milliseconds) override {
    const uint64_t number = round_++;
    std::shared_ptr<Region>& entry = meeting_[number];
    if (!entry) entry = std::make_shared<Region>(static_cast<std::size_t>(ranks()));
    const std::shared_ptr<Region> region = entry;
    region->parts[static_cast<std::size_t>(rank_)] = world_.lasting_memory(bytes, purpose);
    if (++region->asked == ranks()) meeting_.erase(number);
    world_.wait_until(rank_, [&] { return region->asked == ranks(); }, "for peers to allocate " + purpose);
    return std::make_shared<RegionMemory>(bytes, region);
  }
  [[nodiscard]] std::optional<comm::Trouble> trouble_with(int) const override { return std::nullopt; }
  void give_up_on(int) noexcept override {}

  void before_wait(const std::function<bool()>& reached, const std::string& what) override {
    if (world_.in_lane())
      throw std::logic_error("a lane waits for what the simulator took for reached: " + what);
    world_.wait_until(rank_, reached, "for a peer: " + what);
  }

 private:
  SimWorld& world_;
  Meeting& meeting_;
  int rank_;
  uint64_t round_ = 0;
};

}  // namespace

uint64_t run_sim_ranks(int ranks, device::SimOptions options,
                       const std::function<void(comm::PeerGroup&, SimWorld&)>& body) {
  SimWorld world(ranks, options);
  Meeting meeting;
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        world.enter(rank);
        comm::PeerGroup group(std::make_unique<SimBackend>(world, meeting, rank), "simulated",
                              std::chrono::seconds(20));
        body(group, world);
      } catch (const std::exception& error) {
        {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
        world.fail(text("rank ", rank, " threw: ", error.what()));
      }
      world.leave(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
  return world.order();
}

}  // namespace fsdpp::test
