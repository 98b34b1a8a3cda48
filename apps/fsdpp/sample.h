#pragma once

#include <string>

#include "apps/fsdpp/config.h"
#include "fsdpp/nn/llama.h"

namespace fsdpp::app {

/// Text that the model writes after `config.prompt`, prompt included: bytes, maybe no UTF-8.
///
/// Collective: every rank runs as many forward passes. Only `writer` (rank 0) computes on the text; the
/// others feed one token, enough to take their part in the gathers, and get "". `place`: where the model
/// lies. `window`: the longest context, in tokens. Throws Interrupted between bytes, and PeerError.
[[nodiscard]] std::string write_sample(nn::Llama& model, const SampleConfig& config, at::Device place,
                                       int64_t window, bool writer);

}  // namespace fsdpp::app
