#pragma once

#include <vector>

#include "fsdpp/runtime/parameter.h"
#include "fsdpp/runtime/sink.h"

namespace fsdpp::runtime {

/// Contributions to weight gradients that wait for backward_dw(). Each keeps alive what it reads: a layer's
/// input and the gradient of its output.
class DelayedGradients {
 public:
  struct Entry {
    Parameter* parameter;
    RowWriter write;
    bool by_rows;  // it can write some rows by themselves
  };

  /// `units`: how many there are.
  explicit DelayedGradients(std::size_t units) : entries_(units), before_(units) {}

  /// A backward begins: forget_last() drops what is added from here on.
  void begin();
  void add(Parameter& parameter, RowWriter write, bool by_rows);
  void forget_last();

  /// What waits in `unit`, in the order in which it came; nothing of it waits afterwards.
  [[nodiscard]] std::vector<Entry> take(int unit);
  [[nodiscard]] bool any(int unit) const { return !entries_[static_cast<std::size_t>(unit)].empty(); }
  [[nodiscard]] bool any() const noexcept;

 private:
  std::vector<std::vector<Entry>> entries_;  // per unit
  std::vector<std::size_t> before_;          // entries per unit when the last backward began
};

/// Writes or adds the whole of `gradient`.
[[nodiscard]] RowWriter writer_of(const at::Tensor& gradient);

}  // namespace fsdpp::runtime
