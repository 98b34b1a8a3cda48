#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "fsdpp/device/operation.h"

namespace fsdpp::trace {

/// Keeps every operation it sees, in order of issue. One per rank.
class Recorder final : public device::Observer {
 public:
  void on_operation(const device::Operation& operation) override { operations_.push_back(operation); }

  [[nodiscard]] const std::vector<device::Operation>& operations() const noexcept { return operations_; }
  void clear() noexcept { operations_.clear(); }

  /// Number of operations of `kind` whose name begins with `prefix`.
  [[nodiscard]] std::size_t count(device::OperationKind kind, const std::string& prefix) const;
  /// Names of the operations for which `keep` says true, in order.
  [[nodiscard]] std::vector<std::string> names(
      const std::function<bool(const device::Operation&)>& keep) const;

 private:
  std::vector<device::Operation> operations_;
};

/// Its place, kind and name: "reduce #12 wait_signal reduce layers.0".
[[nodiscard]] std::string label(const device::Operation& operation);
/// One line for people: "reduce #12 wait_signal reduce layers.0 (rank 2, channel 7, sequence 3)".
[[nodiscard]] std::string describe(const device::Operation& operation);

}  // namespace fsdpp::trace
