#include "fsdpp/runtime/pass.h"

#include <algorithm>

#include "fsdpp/base/error.h"

namespace fsdpp::runtime {
namespace {

bool allowed(Phase from, Phase to) {
  switch (from) {
    case Phase::forward:
      return to == Phase::waiting || to == Phase::done || to == Phase::abandoned ||
             to == Phase::backward;  // a side output's backward inside the forward
    case Phase::waiting:
      return to == Phase::backward;
    case Phase::backward:
      return to == Phase::backward || to == Phase::done;
    case Phase::done:
      return to == Phase::backward;  // the graph was retained
    case Phase::abandoned:
      return to == Phase::backward;
  }
  return false;
}

}  // namespace

const char* to_string(Phase phase) noexcept {
  switch (phase) {
    case Phase::forward:
      return "forward";
    case Phase::waiting:
      return "waiting";
    case Phase::backward:
      return "backward";
    case Phase::done:
      return "done";
    case Phase::abandoned:
      return "abandoned";
  }
  return "?";
}

void Pass::move_to(Phase next) {
  FSDPP_INVARIANT(allowed(phase_, next), "unit ", unit_, ": a pass in phase ", to_string(phase_),
                  " cannot go to ", to_string(next));
  phase_ = next;
}

void PassTable::add(const std::shared_ptr<Pass>& pass) {
  std::erase_if(passes_, [](const std::weak_ptr<Pass>& entry) { return entry.expired(); });
  passes_.push_back(pass);
}

std::vector<std::shared_ptr<Pass>> PassTable::alive() {
  std::vector<std::shared_ptr<Pass>> result;
  for (const std::weak_ptr<Pass>& entry : passes_) {
    if (auto pass = entry.lock()) result.push_back(std::move(pass));
  }
  return result;
}

void PassTable::complete_backward() {
  for (const auto& pass : alive()) {
    if (pass->phase() == Phase::backward) pass->move_to(Phase::done);
  }
}

}  // namespace fsdpp::runtime
