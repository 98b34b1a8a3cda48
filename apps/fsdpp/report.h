#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "apps/fsdpp/config.h"
#include "fsdpp/data/corpus.h"
#include "fsdpp/observe/resident.h"
#include "fsdpp/runtime/sharded_model.h"

namespace fsdpp::app {

/// Model size, text, units and the memory plan of a rank: what is printed before the first step.
[[nodiscard]] std::string start_report(const Config& config, const runtime::ShardedModel& sharded,
                                       const data::Corpus& corpus);

/// What weights, gradients and AdamW's state take in fp32, in bytes.
struct Held {
  int64_t per_rank = 0;   // on this rank, the runtime's peak and the optimizer's state
  int64_t one_alone = 0;  // in one process that holds the whole model
};
[[nodiscard]] Held held(const runtime::ShardedModel& sharded);

/// What a rank held against what one rank alone would hold, and what the system says of each rank's process.
[[nodiscard]] std::string memory_report(const runtime::ShardedModel& sharded,
                                        const std::vector<observe::Resident>& residents);

}  // namespace fsdpp::app
