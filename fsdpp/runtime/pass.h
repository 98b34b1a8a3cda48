#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace fsdpp::runtime {

/// Where one pass through a unit stands. In pipelines and repeated calls one unit is in several passes at
/// once, so this belongs to the pass, not to the unit.
enum class Phase {
  forward,    // between enter and finish
  waiting,    // its graph may come back in a backward
  backward,   // a hook of it has run
  done,       // its weight gradients are complete; may be reached again (retain_graph)
  abandoned,  // its forward raised
};

[[nodiscard]] const char* to_string(Phase phase) noexcept;

/// One forward through a unit and the backward that may follow. The graph's hooks own it: when the graph
/// goes, it goes.
class Pass {
 public:
  Pass(int unit, bool with_gradient, bool recompute) noexcept
      : unit_(unit), with_gradient_(with_gradient), recompute_(recompute) {}

  /// Aborts unless the move is in the table of allowed moves.
  void move_to(Phase next);

  [[nodiscard]] int unit() const noexcept { return unit_; }
  [[nodiscard]] Phase phase() const noexcept { return phase_; }
  [[nodiscard]] bool with_gradient() const noexcept { return with_gradient_; }
  [[nodiscard]] bool recompute() const noexcept { return recompute_; }  // a forward inside a backward

 private:
  int unit_;
  bool with_gradient_;
  bool recompute_;
  Phase phase_ = Phase::forward;
};

/// The passes of one unit that may still come back.
class PassTable {
 public:
  void add(const std::shared_ptr<Pass>& pass);
  /// Passes of which a graph is alive, in order of their forward.
  [[nodiscard]] std::vector<std::shared_ptr<Pass>> alive();
  /// Moves every pass that is in backward to done.
  void complete_backward();

 private:
  std::vector<std::weak_ptr<Pass>> passes_;
};

}  // namespace fsdpp::runtime
