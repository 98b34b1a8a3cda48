#include "apps/pipeline/schedule.h"

#include <algorithm>

#include "fsdpp/base/error.h"

namespace fsdpp::pipeline {
namespace {

using Kind = Action::Kind;

// The n-th forward or backward of a stage: microbatches go through a chunk in groups as large as the
// pipeline is deep, then through the next chunk (backward: the one before).
Action nth(int n, Kind kind, int chunk_count, int stages) {
  const int in_round = n % (stages * chunk_count);
  const int chunk = in_round / stages;
  const int microbatch = n / (stages * chunk_count) * stages + in_round % stages;
  return {kind, kind == Kind::forward ? chunk : chunk_count - 1 - chunk, microbatch};
}

// Weight gradients are computed where the pipeline would stand still: as many backwards later as the stage is
// deep in it.
std::vector<Action> split(const std::vector<Action>& whole, int stage) {
  std::vector<Action> result;
  std::vector<Action> owed;
  for (const Action& action : whole) {
    result.push_back(action);
    if (action.kind != Kind::backward) continue;
    owed.push_back({Kind::weight_gradients, action.chunk, action.microbatch});
    if (static_cast<int>(owed.size()) <= stage) continue;
    result.push_back(owed.front());
    owed.erase(owed.begin());
  }
  result.insert(result.end(), owed.begin(), owed.end());
  return result;
}

}  // namespace

std::string to_string(Schedule schedule) {
  switch (schedule) {
    case Schedule::one_forward_one_backward:
      return "1F1B";
    case Schedule::interleaved:
      return "interleaved 1F1B";
    case Schedule::zero_bubble:
      return "zero bubble";
  }
  return "?";
}

int chunks(Schedule schedule) noexcept { return schedule == Schedule::interleaved ? 2 : 1; }

std::vector<Action> actions(Schedule schedule, int stage, int stages, int microbatches) {
  const int chunk_count = chunks(schedule);
  require(chunk_count == 1 || microbatches % stages == 0, "interleaved schedule: ", microbatches,
          " microbatches on ", stages, " stages; expected a multiple of the stages");
  const int total = microbatches * chunk_count;
  const int ahead =
      chunk_count == 1 ? stages - 1 - stage : 2 * (stages - 1 - stage) + (chunk_count - 1) * stages;
  const int warm_up = std::min(ahead, total);
  std::vector<Action> whole;
  for (int n = 0; n < warm_up; ++n) whole.push_back(nth(n, Kind::forward, chunk_count, stages));
  for (int n = 0; n < total; ++n) {
    if (n + warm_up < total) whole.push_back(nth(n + warm_up, Kind::forward, chunk_count, stages));
    whole.push_back(nth(n, Kind::backward, chunk_count, stages));
  }
  return schedule == Schedule::zero_bubble ? split(whole, stage) : whole;
}

}  // namespace fsdpp::pipeline
