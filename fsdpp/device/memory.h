#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "fsdpp/device/ledger.h"

namespace fsdpp::device {

/// Page-aligned, zero-filled host memory of one purpose, entered in a ledger while it lives. Move-only.
class HostMemory {
 public:
  HostMemory() = default;
  /// Throws EnvironmentError, naming purpose and bytes, when the system has no room. `ledger` must outlive
  /// it.
  HostMemory(std::size_t bytes, std::string purpose, std::shared_ptr<Ledger> ledger);
  ~HostMemory();
  HostMemory(HostMemory&& other) noexcept;
  HostMemory& operator=(HostMemory&& other) noexcept;
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  void free() noexcept;

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::string purpose_;
  std::shared_ptr<Ledger> ledger_;
};

/// A range of addresses without memory behind it: the place released storage points at. Touching it ends the
/// process with a message that names the owner ("weights of unit layers.3 ..."): a view outlived its weights.
class ForbiddenRange {
 public:
  ForbiddenRange() = default;
  /// `message` is printed by the fault handler. Costs address space only.
  ForbiddenRange(std::size_t bytes, const std::string& message);
  ~ForbiddenRange();
  ForbiddenRange(ForbiddenRange&& other) noexcept;
  ForbiddenRange& operator=(ForbiddenRange&& other) noexcept;
  ForbiddenRange(const ForbiddenRange&) = delete;
  ForbiddenRange& operator=(const ForbiddenRange&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }

 private:
  void free() noexcept;

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  int slot_ = -1;  // in the handler's table
};

}  // namespace fsdpp::device
