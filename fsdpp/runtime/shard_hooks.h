#pragma once

#include <memory>
#include <vector>

#include "fsdpp/runtime/parameter.h"

namespace fsdpp::runtime {

/// Calls the post-accumulate hooks that users set on the shards of `parameters`, in their order, of those
/// with a gradient: no autograd node accumulates these gradients, so autograd does not. Also where a shard is
/// empty, so that hooks that communicate are in step. What a hook throws ends it.
void call_shard_hooks(const std::vector<std::shared_ptr<Parameter>>& parameters);

}  // namespace fsdpp::runtime
