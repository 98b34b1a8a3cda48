#include "apps/fsdpp/train.h"

#include <sys/prctl.h>

#include <array>
#include <chrono>
#include <cmath>
#include <memory>

#include "apps/fsdpp/output.h"
#include "apps/fsdpp/place.h"
#include "apps/fsdpp/report.h"
#include "apps/fsdpp/sample.h"
#include "apps/fsdpp/trainer.h"
#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "fsdpp/data/tokenizer.h"
#include "fsdpp/observe/metrics.h"
#include "fsdpp/observe/resident.h"

namespace fsdpp::app {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// One rank's run from its first step to the results.
class Run {
 public:
  Run(const Config& config, comm::PeerGroup& group, const data::Split& split, const Place& place)
      : config_(config),
        group_(group),
        place_(place),
        trainer_(config, group, split,
                 place.gpu >= 0 ? make_gpu_lanes(group, place.gpu, place.shared) : nullptr),
        output_(config.output, group.rank() == 0) {}

  void start(const data::Corpus& corpus) {
    output_.text(start_report(config_, place_, trainer_.sharded(), corpus));
    output_.text("");
    output_.event("start", {{"ranks", int64_t{group_.ranks()}},
                            {"device", std::string(place_.gpu >= 0 ? "cuda" : "cpu")},
                            {"steps", config_.train.steps},
                            {"tokens_per_step", trainer_.tokens_per_step()}});
  }

  void steps() {
    const TrainConfig& t = config_.train;
    begin_ = Clock::now();
    for (int64_t step = 0; step < t.steps; ++step) {
      const auto step_begin = Clock::now();
      const StepResult result = trainer_.step(step);
      loss_sum_ = loss_count_ == 0 ? result.loss : loss_sum_ + result.loss;
      ++loss_count_;
      const int64_t done = step + 1;
      const bool last = done == t.steps;
      const bool shown = step == 0 || last || done % t.log_every == 0;
      const bool validated = last || (t.eval_every > 0 && done % t.eval_every == 0);
      if (shown || validated)
        trainer_.sharded().device().synchronize();  // a GPU's work counts to its own steps
      step_seconds_ += seconds_since(step_begin);
      if (shown) log(done, result);
      if (validated) validate(done);
    }
    train_s_ = seconds_since(begin_);
    output_.end_progress();
  }

  void end_progress() { output_.end_progress(); }

  void finish() {
    const Memory memory = all_memory();  // before the sample's own
    const bool first = group_.rank() == 0;
    const std::string sample =
        write_sample(trainer_.model(), config_.sample, trainer_.place(), config_.model.sequence, first);
    if (!first) return;
    output_.text(text("\ntrained ", config_.train.steps, " steps in ", observe::human_seconds(train_s_), ", ",
                      static_cast<int64_t>(tokens_per_s()), " tokens/s; validation loss ", validation_loss_,
                      " nats per byte"));
    if (config_.sample.bytes > 0) {
      output_.text(text("\nsample\n------\n", data::escape_bytes(sample), "\n------"));
    }
    output_.text(text("\n", memory_report(trainer_.sharded(), memory)));
    const observe::Fields results = results_of(memory, sample);
    output_.event("end", results);
    if (!config_.output.results.empty()) observe::write_results(config_.output.results, results);
  }

 private:
  [[nodiscard]] double tokens_per_s() const {
    return static_cast<double>(config_.train.steps * trainer_.tokens_per_step()) / step_seconds_;
  }

  void log(int64_t done, const StepResult& result) {
    const double loss = trainer_.mean(loss_sum_.item<double>() / static_cast<double>(loss_count_));
    const double seconds = step_seconds_ - logged_seconds_;
    const int64_t steps = done - logged_steps_;
    output_.step({.step = done,
                  .steps = config_.train.steps,
                  .loss = loss,
                  .gradient_norm = result.gradient_norm.item<double>(),
                  .learning_rate = result.learning_rate,
                  .tokens_per_s = static_cast<double>(steps * trainer_.tokens_per_step()) / seconds,
                  .memory_bytes = observe::resident().own,
                  .seconds_left = step_seconds_ / static_cast<double>(done) *
                                  static_cast<double>(config_.train.steps - done)},
                 seconds_since(begin_));
    require_finite("loss", loss, done);
    loss_count_ = 0;
    logged_seconds_ = step_seconds_;
    logged_steps_ = done;
  }

  void validate(int64_t done) {
    validation_loss_ = trainer_.validate();
    output_.text(text("step ", done, "  validation loss ", validation_loss_, " nats per byte"));
    output_.event("validation",
                  {{"step", done}, {"loss", validation_loss_}, {"seconds", seconds_since(begin_)}});
    require_finite("validation loss", validation_loss_, done);
  }

  /// Weights that are no numbers never become some again. Every rank finds the same.
  void require_finite(const char* what, double value, int64_t step) {
    if (std::isfinite(value)) return;
    output_.end_progress();
    const TrainConfig& t = config_.train;
    throw EnvironmentError(text("the ", what, " is ", value, " by step ", step,
                                ": training has diverged; lower train.learning_rate (", t.learning_rate,
                                "), train.weight_decay (", t.weight_decay, ") or train.clip_norm (",
                                t.clip_norm, "), or raise train.warmup_steps (", t.warmup_steps, ")"));
  }

  /// Collective: every rank's memory, in rank order.
  [[nodiscard]] Memory all_memory() {
    const observe::Resident own = observe::resident();
    const std::array values = {static_cast<double>(own.now), static_cast<double>(own.peak),
                               static_cast<double>(own.own), static_cast<double>(own.proportional),
                               static_cast<double>(place_.gpu >= 0 ? gpu_bytes() : 0)};
    const std::vector<double> all = group_.exchange(values);
    Memory out;
    for (size_t i = 0; i + 4 < all.size(); i += values.size()) {
      out.processes.push_back({.now = static_cast<int64_t>(all[i]),
                               .peak = static_cast<int64_t>(all[i + 1]),
                               .own = static_cast<int64_t>(all[i + 2]),
                               .proportional = static_cast<int64_t>(all[i + 3])});
      if (place_.gpu >= 0) out.gpus.push_back(static_cast<int64_t>(all[i + 4]));
    }
    return out;
  }

  [[nodiscard]] observe::Fields results_of(const Memory& memory, const std::string& sample) {
    const Held bytes = held(trainer_.sharded());
    std::vector<int64_t> now, peak, without_files, proportional;
    for (const auto& r : memory.processes) {
      now.push_back(r.now);
      peak.push_back(r.peak);
      without_files.push_back(r.own);
      proportional.push_back(r.proportional);
    }
    observe::Fields out = {{"val_loss", validation_loss_},
                           {"train_s", train_s_},
                           {"ranks", int64_t{group_.ranks()}},
                           {"tokens_per_s", tokens_per_s()},
                           {"steps", config_.train.steps},
                           {"tokens", config_.train.steps * trainer_.tokens_per_step()},
                           {"held_bytes", bytes.per_rank},
                           {"one_rank_alone_bytes", bytes.one_alone},
                           {"resident_bytes", now},
                           {"peak_resident_bytes", peak},
                           {"own_bytes", without_files},
                           {"proportional_bytes", proportional},
                           {"sample", sample}};
    if (!memory.gpus.empty()) out.emplace_back("gpu_bytes", memory.gpus);
    return out;
  }

  const Config& config_;
  comm::PeerGroup& group_;
  const Place& place_;
  Trainer trainer_;
  Output output_;
  Clock::time_point begin_;
  double step_seconds_ = 0;    // in steps alone, without validation
  double logged_seconds_ = 0;  // of them, those before the last log
  int64_t logged_steps_ = 0;
  at::Tensor loss_sum_;  // of steps since the last log, where the model lies
  int64_t loss_count_ = 0;
  double validation_loss_ = 0;
  double train_s_ = 0;
};

}  // namespace

void train(const Config& config, const data::Corpus& corpus, const comm::Identity& identity,
           const Place& place) {
  if (identity.ranks > 1) prctl(PR_SET_NAME, text("fsdpp rank ", identity.rank).c_str());
  const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(config.sharding.timeout_s * 1000));
  auto group = comm::connect(identity, timeout);
  auto run = std::make_unique<Run>(config, *group, corpus.split(config.data.validation_fraction), place);
  try {
    run->start(corpus);
    run->steps();
    run->finish();
    group->barrier();  // no rank takes its memory away while another still reads
  } catch (...) {
    // What is queued on a GPU may wait for a rank that never comes, and destructors wait for what is queued.
    if (place.gpu >= 0) {
      run->end_progress();
      if (interrupted()) group->lanes().leave();
      static_cast<void>(run.release());
      static_cast<void>(group.release());
    }
    throw;
  }
}

}  // namespace fsdpp::app
