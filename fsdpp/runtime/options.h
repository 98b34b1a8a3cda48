#pragma once

#include <string>

namespace fsdpp::runtime {

/// What is sharded, and with that what is communicated when.
enum class Strategy {
  no_shard,            // everything whole on each rank; all-reduce of gradients at the window's last backward
  optim_grads_params,  // ZeRO-3 (Rajbhandari et al. 2020): weights gathered in forward and backward,
                       // gradients reduced every backward, optimizer state on shards
};

/// What the reduce makes of the ranks' gradients.
enum class Combine {
  mean,  // sum divided by the number of ranks
  sum,
};

struct Options {
  Strategy strategy = Strategy::optim_grads_params;
  Combine combine = Combine::mean;
  bool fused = true;  // fused layers write their weight gradients straight into the gradient slot
};

[[nodiscard]] std::string to_string(Strategy strategy);
/// Throws UsageError that lists the names there are.
[[nodiscard]] Strategy strategy_from(const std::string& name);

}  // namespace fsdpp::runtime
