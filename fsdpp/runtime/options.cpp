#include "fsdpp/runtime/options.h"

#include "fsdpp/base/error.h"

namespace fsdpp::runtime {

namespace {

constexpr std::array kNames = {"no_shard", "optim", "optim_grads", "optim_grads_params"};  // as kStrategies

}  // namespace

std::string to_string(Strategy strategy) { return kNames[static_cast<std::size_t>(strategy)]; }

Strategy strategy_from(const std::string& name) {
  std::string known;
  for (const Strategy strategy : kStrategies) {
    if (to_string(strategy) == name) return strategy;
    known += (known.empty() ? "" : ", ") + to_string(strategy);
  }
  throw UsageError(text("strategy \"", name, "\" is unknown; expected one of ", known));
}

}  // namespace fsdpp::runtime
