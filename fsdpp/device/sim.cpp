#include "fsdpp/device/sim.h"

#include <cstring>

#include "fsdpp/device/sanitizer.h"

namespace fsdpp::device {

SimDevice::SimDevice(SimWorld& world, int rank) : world_(world) {
  lanes_.rank = rank;
  world_.add(lanes_);
}

SimDevice::~SimDevice() { world_.remove(lanes_); }

Memory SimDevice::allocate(std::size_t bytes, std::string purpose, std::shared_ptr<Ledger> ledger) {
  if (bytes == 0) return {};
  std::byte* const data = world_.lasting_memory(bytes, purpose);
  const auto spoil = [](std::byte* begin, std::size_t size) noexcept {
    unpoison(begin, size);
    std::memset(begin, kSimGarbage, size);
  };
  return {data, bytes, spoil, std::move(purpose), std::move(ledger)};
}

void SimDevice::submit(const Operation& operation, Work work) {
  const bool drop = dropped && dropped(operation);
  if (operation.lane == LaneKind::host) {
    if (!drop) world_.run_on_host(lanes_, operation, work);
    return;
  }
  if (operation.lane == LaneKind::compute) given_ = operation.position;
  world_.issue(lanes_, operation, std::move(work), drop);
}

void SimDevice::stay_near() {
  ahead_.push_back(given_);
  if (static_cast<int>(ahead_.size()) <= world_.units_ahead()) return;
  const uint64_t oldest = ahead_.front();
  ahead_.pop_front();
  world_.wait_until(lanes_.rank, [&] { return lanes_.ended[0] >= oldest; }, "to stay near the compute lane");
}

}  // namespace fsdpp::device
