#pragma once

#include <algorithm>
#include <chrono>

namespace fsdpp::comm {

/// Measures one wait for a peer in pieces of at most kSlice, and says when its timeout is used up.
///
/// A piece counts for at most kMostPerSlice: while this process itself is stopped (Ctrl-Z and fg) no time
/// passes, so that a job that was put aside as a whole does not blame a peer when it goes on.
class WaitClock {
 public:
  using milliseconds = std::chrono::milliseconds;
  static constexpr milliseconds kSlice{100};
  static constexpr milliseconds kMostPerSlice{500};

  explicit WaitClock(milliseconds timeout) : left_(timeout) {}

  /// Takes the time since the last call off; true while some is left.
  [[nodiscard]] bool running() {
    const auto now = std::chrono::steady_clock::now();
    left_ -= std::min<std::chrono::nanoseconds>(now - last_, kMostPerSlice);
    last_ = now;
    return left_.count() > 0;
  }

  /// How long the next piece may last: at most kSlice and what is left, at least nothing.
  [[nodiscard]] std::chrono::nanoseconds slice() const {
    return std::clamp<std::chrono::nanoseconds>(left_, std::chrono::nanoseconds(0), kSlice);
  }

 private:
  std::chrono::nanoseconds left_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace fsdpp::comm
