#include "fsdpp/runtime/options.h"

#include "fsdpp/base/error.h"

namespace fsdpp::runtime {

std::string to_string(Strategy strategy) {
  return strategy == Strategy::no_shard ? "no_shard" : "optim_grads_params";
}

Strategy strategy_from(const std::string& name) {
  for (const Strategy strategy : {Strategy::no_shard, Strategy::optim_grads_params}) {
    if (to_string(strategy) == name) return strategy;
  }
  throw UsageError(text("strategy \"", name, "\" is unknown; expected no_shard or optim_grads_params"));
}

}  // namespace fsdpp::runtime
