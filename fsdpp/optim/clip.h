#pragma once

#include <vector>

#include "fsdpp/runtime/sharded_model.h"

namespace fsdpp::optim {

/// Scales all gradients so that their global norm is at most `max_norm`, and returns the norm before, the
/// same bits on every rank. Collective, but for no_shard.
///
/// `norm_type`: 1, 2, any other p > 0, or infinity. Each parameter counts once, padding never. As in
/// torch.nn.utils.clip_grad_norm_ the factor is max_norm / (norm + 1e-6), at most 1; a norm that is NaN or
/// infinite on one rank is so on all. Throws UsageError for a max_norm below 0 or a norm_type that is not
/// above 0.
double clip_grad_norm(runtime::ShardedModel& model, double max_norm, double norm_type = 2.0);
/// The same with one norm over several models' gradients (a model and its experts).
double clip_grad_norm(const std::vector<runtime::ShardedModel*>& models, double max_norm,
                      double norm_type = 2.0);

}  // namespace fsdpp::optim
