#pragma once

#include <string>

namespace fsdpp::layout {

/// How a buffer's values lie along one axis of a mesh.
enum class Placement {
  replicate,  // every rank has the whole
  partial,    // every rank has a whole of its own; the value is their sum
  shard,      // every rank has its shard
};

/// What changes a placement along one axis.
enum class Transition {
  none,        // the two are the same
  gather,      // shard -> replicate
  reduce,      // partial -> shard
  all_reduce,  // partial -> replicate
  slice,       // replicate -> shard
};

/// The transition from `from` to `to`. Throws UsageError that names both for an illegal one (into partial,
/// and shard -> partial).
[[nodiscard]] Transition transition(Placement from, Placement to);

[[nodiscard]] std::string to_string(Placement placement);
[[nodiscard]] std::string to_string(Transition transition);

}  // namespace fsdpp::layout
