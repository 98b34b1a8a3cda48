#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "apps/fsdpp/config.h"
#include "apps/fsdpp/device_choice.h"
#include "fsdpp/data/corpus.h"
#include "fsdpp/observe/resident.h"
#include "fsdpp/runtime/sharded_model.h"

namespace fsdpp::app {

/// Model size, device, text, units and the memory plan of a rank: what is printed before the first step.
[[nodiscard]] std::string start_report(const Config& config, const Place& place,
                                       const runtime::ShardedModel& sharded, const data::Corpus& corpus);

/// What weights, gradients and AdamW's state take in fp32, in bytes.
struct Held {
  int64_t per_rank = 0;   // on this rank, the runtime's peak and the optimizer's state
  int64_t one_alone = 0;  // in one process that holds the whole model
};
[[nodiscard]] Held held(const runtime::ShardedModel& sharded);

/// Memory of every rank, in rank order.
struct Memory {
  std::vector<observe::Resident> processes;
  std::vector<int64_t> gpus;  // taken of the rank's GPU by everybody, as the driver sees it; on CPUs empty
};

/// What a rank held against what one rank alone would hold, and what system and driver say of each rank.
[[nodiscard]] std::string memory_report(const runtime::ShardedModel& sharded, const Memory& memory);

}  // namespace fsdpp::app
