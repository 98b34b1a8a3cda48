#include "fsdpp/layout/placement.h"

#include "fsdpp/base/error.h"

namespace fsdpp::layout {

Transition transition(Placement from, Placement to) {
  if (from == to) return Transition::none;
  if (from == Placement::shard && to == Placement::replicate) return Transition::gather;
  if (from == Placement::replicate && to == Placement::shard) return Transition::slice;
  if (from == Placement::partial && to == Placement::shard) return Transition::reduce;
  if (from == Placement::partial && to == Placement::replicate) return Transition::all_reduce;
  throw UsageError(
      text("no transition leads from ", to_string(from), " to ", to_string(to),
           "; expected shard -> replicate, partial -> shard, partial -> replicate or replicate "
           "-> shard: only contributions make a partial value, so start one with an accumulator"));
}

std::string to_string(Placement placement) {
  switch (placement) {
    case Placement::replicate:
      return "replicate";
    case Placement::partial:
      return "partial";
    case Placement::shard:
      return "shard";
  }
  return text("Placement(", static_cast<int>(placement), ")");
}

std::string to_string(Transition transition) {
  switch (transition) {
    case Transition::none:
      return "none";
    case Transition::gather:
      return "gather";
    case Transition::reduce:
      return "reduce";
    case Transition::all_reduce:
      return "all_reduce";
    case Transition::slice:
      return "slice";
  }
  return text("Transition(", static_cast<int>(transition), ")");
}

}  // namespace fsdpp::layout
