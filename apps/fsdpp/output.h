#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "apps/fsdpp/config.h"
#include "fsdpp/observe/metrics.h"
#include "fsdpp/observe/progress.h"

namespace fsdpp::app {

/// What rank 0 shows on stdout and writes to the metrics file; the same calls do nothing on an inactive one.
class Output {
 public:
  /// Throws EnvironmentError when the metrics file cannot be written; so do step() and event().
  Output(const OutputConfig& config, bool active);

  /// Whole lines, above the progress bar.
  void text(std::string_view lines);
  /// Progress and a line of metrics. `seconds`: since the first step began.
  void step(const observe::StepFigures& figures, double seconds);
  /// A line of metrics that begins with the event's name.
  void event(const std::string& name, const observe::Fields& fields);
  void end_progress();

 private:
  observe::MetricsWriter metrics_;
  std::optional<observe::Progress> progress_;
};

}  // namespace fsdpp::app
