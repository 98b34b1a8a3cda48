#pragma once

#include <string>
#include <vector>

namespace fsdpp::pipeline {

/// What a stage does next, for one microbatch in one of its chunks of the model.
struct Action {
  enum class Kind {
    forward,
    backward,          // the input's gradient; the weights' too unless the schedule splits them
    weight_gradients,  // what a split backward left
  };
  Kind kind;
  int chunk;  // of the stage's own, from the model's beginning on
  int microbatch;
};

/// The orders in which a stage can work off its microbatches.
enum class Schedule {
  one_forward_one_backward,  // 1F1B (Narayanan et al. 2019, PipeDream-Flush)
  interleaved,               // 1F1B with several chunks per stage (Narayanan et al. 2021)
  zero_bubble,               // 1F1B with split backwards, ZB-H1 (Qi et al. 2023)
};

[[nodiscard]] std::string to_string(Schedule schedule);
/// Chunks of the model on each stage.
[[nodiscard]] int chunks(Schedule schedule) noexcept;

/// The actions of `stage` of `stages` for `microbatches`, in order. All stages that follow theirs never wait
/// for each other in a circle. Throws UsageError unless the interleaved schedule's microbatches are a
/// multiple of the stages.
[[nodiscard]] std::vector<Action> actions(Schedule schedule, int stage, int stages, int microbatches);

}  // namespace fsdpp::pipeline
