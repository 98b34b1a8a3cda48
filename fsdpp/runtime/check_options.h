#pragma once

#include <string>

#include "fsdpp/runtime/options.h"
#include "fsdpp/runtime/rank_groups.h"

namespace fsdpp::runtime {

/// Throws UsageError, naming both sides, for options that do not go together (docs/strategies.md lists them),
/// and for values that none of them may have.
/// `options`: as unit `unit` has them.
void check_options(const Options& options, const RankGroups& ranks, const std::string& unit);

}  // namespace fsdpp::runtime
