#pragma once

#include "apps/fsdpp/config.h"
#include "apps/fsdpp/device_choice.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/data/corpus.h"

namespace fsdpp::app {

/// Trains as `config` says, as one rank of a job. Rank 0 prints to stdout and writes metrics and results.
/// Throws Interrupted on SIGINT and SIGTERM, PeerError when another rank is lost, EnvironmentError. On a GPU
/// it then leaves everything as it is, for the process to end at once; and when a rank is lost while the GPU
/// waits for it, the process ends by itself, with kLostPeer.
void train(const Config& config, const data::Corpus& corpus, const comm::Identity& identity,
           const Place& place);

}  // namespace fsdpp::app
