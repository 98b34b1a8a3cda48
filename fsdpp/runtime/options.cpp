#include "fsdpp/runtime/options.h"

#include "fsdpp/base/error.h"

namespace fsdpp::runtime {

namespace {

constexpr std::array kNames = {"no_shard", "optim", "optim_grads", "optim_grads_params"};  // as kStrategies

}  // namespace

Options with(const Options& options, const UnitChoice& choice) {
  Options own = options;
  own.strategy = choice.strategy.value_or(own.strategy);
  if (choice.model_dtype) own.model_dtype = choice.model_dtype;
  own.main_weights = choice.main_weights.value_or(own.main_weights);
  own.accumulation_dtype = choice.accumulation_dtype.value_or(own.accumulation_dtype);
  own.wire_dtype = choice.wire_dtype.value_or(own.wire_dtype);
  own.output_dtype = choice.output_dtype;
  own.reshard_after_forward = choice.reshard_after_forward.value_or(own.reshard_after_forward);
  // What cannot apply to another strategy was meant for others.
  if (!choice.reshard_after_forward && choice.strategy && !shards_parameters(own.strategy))
    own.reshard_after_forward = true;
  if (!choice.wire_dtype && choice.strategy && !shards_gradients(own.strategy))
    own.wire_dtype = own.accumulation_dtype;
  return own;
}

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
