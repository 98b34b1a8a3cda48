#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "fsdpp/device/ledger.h"

namespace fsdpp::device {

/// Memory of one purpose, entered in a ledger while it lives. Move-only.
class Memory {
 public:
  using Free = void (*)(std::byte* data, std::size_t bytes) noexcept;

  Memory() = default;
  /// Takes over `data` (`bytes` long), which `free` gives back. `ledger` may be null.
  Memory(std::byte* data, std::size_t bytes, Free free, std::string purpose, std::shared_ptr<Ledger> ledger);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  void free() noexcept;

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  Free free_ = nullptr;
  std::string purpose_;
  std::shared_ptr<Ledger> ledger_;
};

/// Page-aligned, zero-filled host memory; none for 0 bytes. Throws EnvironmentError, naming purpose and
/// bytes, when the system has no room.
[[nodiscard]] Memory host_memory(std::size_t bytes, std::string purpose, std::shared_ptr<Ledger> ledger);

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
