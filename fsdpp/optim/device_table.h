#pragma once

#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "fsdpp/device/memory.h"
#include "fsdpp/device/optimizer_kernels.h"
#include "fsdpp/runtime/sharded_model.h"

namespace fsdpp::optim {

/// Runs of elements that a kernel works through, as a table on the device.
template <class Run>
struct DeviceTable {
  std::vector<Run> runs;  // as last sent
  device::Memory memory;
  int64_t tiles = 0;

  [[nodiscard]] const Run* data() const { return reinterpret_cast<const Run*>(memory.data()); }
  [[nodiscard]] int count() const { return static_cast<int>(runs.size()); }

  /// Makes `wanted` the table's runs on the compute lane; it is sent again only when it has changed.
  void send(runtime::ShardedModel& model, std::vector<Run> wanted, const char* name) {
    tiles = device::place_tiles(std::span(wanted));
    const std::size_t bytes = wanted.size() * sizeof(Run);
    const bool same = wanted.size() == runs.size() &&
                      (wanted.empty() || std::memcmp(wanted.data(), runs.data(), bytes) == 0);
    if (same) return;
    if (memory.bytes() < bytes) {
      model.device().synchronize();
      memory = model.device().allocate(bytes, "tables of the optimizer", model.ledger());
    }
    runs = std::move(wanted);
    model.device().upload(device::LaneKind::compute, name, memory.data(), runs.data(), bytes);
  }
};

}  // namespace fsdpp::optim
