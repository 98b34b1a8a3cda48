#pragma once

#include "apps/fsdpp/config.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/data/corpus.h"

namespace fsdpp::app {

/// Trains as `config` says, as one rank of a job. Rank 0 prints to stdout and writes metrics and results.
/// Throws Interrupted on SIGINT and SIGTERM, PeerError when another rank is lost, EnvironmentError.
void train(const Config& config, const data::Corpus& corpus, const comm::Identity& identity);

}  // namespace fsdpp::app
