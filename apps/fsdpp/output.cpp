#include "apps/fsdpp/output.h"

#include <unistd.h>

#include <iostream>

namespace fsdpp::app {

Output::Output(const OutputConfig& config, bool active) : metrics_(active ? config.metrics : "") {
  if (!active) return;
  progress_.emplace(std::cout, observe::Progress::Options{.terminal = observe::is_terminal(STDOUT_FILENO),
                                                          .width = observe::terminal_width(STDOUT_FILENO)});
}

void Output::text(std::string_view lines) {
  while (lines.ends_with('\n')) lines.remove_suffix(1);
  if (progress_) progress_->line(lines);
}

void Output::step(const observe::StepFigures& f, double seconds) {
  if (progress_) progress_->update(f);
  event("step", {{"step", f.step},
                 {"loss", f.loss},
                 {"gradient_norm", f.gradient_norm},
                 {"learning_rate", f.learning_rate},
                 {"tokens_per_s", f.tokens_per_s},
                 {"memory_bytes", f.memory_bytes},
                 {"seconds", seconds}});
}

void Output::event(const std::string& name, const observe::Fields& fields) {
  observe::Fields all = {{"event", name}};
  all.insert(all.end(), fields.begin(), fields.end());
  metrics_.write(all);
}

void Output::end_progress() {
  if (progress_) progress_->finish();
}

}  // namespace fsdpp::app
