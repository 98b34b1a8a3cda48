#pragma once

#include <torch/nn/module.h>

namespace fsdpp::runtime {

/// Throws a UsageError that lists the parameters and buffers of `root` that have no data, as deferred
/// initialisation leaves them: on the meta device, or with a storage that ends before they do. What another
/// sharded model has taken over is left out, and so is what was registered undefined: it is absent. Reads
/// no data.
void check_data(const torch::nn::Module& root);

}  // namespace fsdpp::runtime
