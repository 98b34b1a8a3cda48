#pragma once

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>

namespace fsdpp::observe {

/// What is known after a step.
struct StepFigures {
  int64_t step = 0;          // steps done
  int64_t steps = 0;         // of how many
  double loss = 0;           // nats per token, mean over ranks and microbatches
  double gradient_norm = 0;  // global, before clipping
  double learning_rate = 0;
  double tokens_per_s = 0;   // all ranks together
  int64_t memory_bytes = 0;  // of this rank's process
  double seconds_left = 0;
};

/// Seconds for people: "8 s", "3:07", "1:02:03".
[[nodiscard]] std::string human_seconds(double seconds);

/// The figures on one line: "step 40/200  loss 2.1034  norm 0.87  lr 3.0e-03  12.3k tokens/s  151.00 MiB left
/// 1:20".
[[nodiscard]] std::string plain_line(const StepFigures& figures);

/// The same as a bar of `width` columns (at least 20), without a line end.
[[nodiscard]] std::string bar_line(const StepFigures& figures, int width);

/// True when the open file `descriptor` is a terminal that understands cursor movement.
[[nodiscard]] bool is_terminal(int descriptor);
/// Columns of the terminal at `descriptor`, 80 when it does not say.
[[nodiscard]] int terminal_width(int descriptor);

/// Shows progress: one bar that is redrawn on a terminal, plain lines elsewhere, neither too often.
class Progress {
 public:
  using Clock = std::chrono::steady_clock;
  struct Options {
    bool terminal = false;
    int width = 80;                           // columns of the terminal
    std::chrono::milliseconds redraw{100};    // between two drawings of the bar
    std::chrono::milliseconds between{2000};  // between two plain lines
  };

  /// `out` must outlive it.
  Progress(std::ostream& out, Options options);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Shows the figures unless something was shown too short a time before `now`; the first and the last step
  /// always.
  void update(const StepFigures& figures, Clock::time_point now = Clock::now());
  /// Prints a whole line (without its end) above the bar.
  void line(std::string_view text);
  /// Leaves the bar as it is and goes to the next line. Done by the destructor too.
  void finish();

 private:
  void draw(const std::string& bar);

  std::ostream& out_;
  Options options_;
  std::optional<Clock::time_point> shown_;
  std::string bar_;  // what stands on the terminal's last line; empty when nothing
};

}  // namespace fsdpp::observe
