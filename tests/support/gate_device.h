#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "fsdpp/device/device.h"
#include "fsdpp/device/sanitizer.h"

namespace fsdpp::test {

/// A door that opens once. Relaxed on purpose: it orders threads in time and gives sanitizers no order to
/// see.
class Gate {
 public:
  void open() noexcept { open_.store(true, std::memory_order_relaxed); }
  [[nodiscard]] bool is_open() const noexcept { return open_.load(std::memory_order_relaxed); }
  /// Returns once it is open; throws after half a minute, so that a wrong schedule fails instead of hanging.
  void pass(const std::string& what) const {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!is_open()) {
      if (std::chrono::steady_clock::now() > limit)
        throw std::runtime_error("nobody opened the gate: " + what);
      std::this_thread::yield();
    }
  }

 private:
  std::atomic<bool> open_{false};
};

/// Host lanes that a test can look into: `before` runs ahead of each operation (it may block on a gate), and
/// an operation for which `dropped` says true is left out; `after` runs behind it.
class GateDevice final : public device::Device {
 public:
  using Look = std::function<void(const device::Operation&)>;

  Look before;
  Look after;
  std::function<bool(const device::Operation&)> dropped;

 protected:
  void submit(const device::Operation& operation, Work work) override {
    if (before) before(operation);
    if (!dropped || !dropped(operation)) {
      if (operation.kind != device::OperationKind::acquire &&
          operation.kind != device::OperationKind::release) {
        for (const ByteRange& range : operation.reads) device::announce_read(range.begin, range.size);
        for (const ByteRange& range : operation.writes) device::announce_write(range.begin, range.size);
      }
      if (work) work();
    }
    if (after) after(operation);
  }
};

[[nodiscard]] inline bool is(const device::Operation& operation, device::OperationKind kind,
                             const std::string& name) {
  return operation.kind == kind && operation.name == name;
}

}  // namespace fsdpp::test
