#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>

#include "fsdpp/runtime/parameter.h"

namespace fsdpp::runtime {

/// Gradients of a window while they are Partial: sums over this rank's backwards, not yet over the ranks.
///
/// The user sees a parameter's accumulator, or this rank's part of it, as the shard's `.grad`: so any
/// optimizer's zero_grad closes it, and a skipped step neither loses nor leaks gradients.
class PartialGradients {
 public:
  /// `shows_all`: `.grad` shows all of what this rank has accumulated; what a user makes of it in between
  /// counts.
  explicit PartialGradients(bool shows_all) : shows_all_(shows_all) {}

  /// The accumulator of `parameter` holds contributions of this window: one came since the last close() or
  /// zero_grad, whoever's that was. Where `.grad` is a part only, throws UsageError when somebody changed it
  /// otherwise: the ranks' other parts would not follow.
  [[nodiscard]] bool holds(Parameter& parameter);
  /// After a holds() that threw: what it refused is dropped, so that the window can be given up.
  void drop_refused(Parameter& parameter);

  /// A window's accumulator will be written: a gradient of `parameter` from before moves out of its bytes.
  void move_out(Parameter& parameter);
  /// The window's first contribution to `parameter` comes: `.grad` is `shown` from here on, and what was
  /// there is kept aside.
  void open(Parameter& parameter, at::Tensor shown);
  /// The first contribution was never written: everything is as before open().
  void take_back(Parameter& parameter);
  /// The accumulator is reduced: what was kept aside is added to `.grad`, as it always was, unless somebody
  /// has cleared that meanwhile.
  void close(Parameter& parameter);
  /// A parameter whose accumulator is open and shows; null: there is none.
  [[nodiscard]] const Parameter* any() const;

 private:
  struct State {
    bool open = false;
    at::Tensor shown;     // what `.grad` was made
    int64_t version = 0;  // of it; our own writes leave that alone
    at::Tensor aside;     // the reduced gradient that was there before
  };

  [[nodiscard]] static bool replaced(const Parameter& parameter, const State& state);
  void take_over(Parameter& parameter, State& state);
  void close_zeroed();

  bool shows_all_;
  std::unordered_map<Parameter*, State> states_;
};

}  // namespace fsdpp::runtime
