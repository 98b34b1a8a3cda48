#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include "fsdpp/comm/backend.h"

namespace fsdpp::comm {

/// A number in peer memory that its owner raises and peers wait for. Zero-filled memory is one at 0.
///
/// One cache line each, so that waiting for one does not slow the raising of another. What the owner wrote
/// before raise() is visible to a peer after its wait.
struct alignas(64) SharedCounter {
  uint32_t value;
  uint32_t
      waiters;  // peers that sleep, or are about to; stays too high when one is killed: then a wake too many
};
static_assert(sizeof(SharedCounter) == 64);

/// Raises `counter` (the caller's own) to `value` and wakes who waits; no system call when nobody does.
void raise(SharedCounter& counter, uint32_t value);

/// The value now, in acquire order.
[[nodiscard]] uint32_t value_of(SharedCounter& counter);

enum class WaitResult { reached, timed_out, peer_lost, interrupted };

/// How a wait ended, and what was seen then.
struct WaitOutcome {
  WaitResult result = WaitResult::reached;
  uint32_t seen = 0;
  std::optional<Trouble> trouble;  // the latest seen with the peer, when lost or timed out
};

/// Waits until `counter` has reached `value` (numbers wrap around: it is never 2^31 away). `trouble` is asked
/// ten times a second; one that is final ends the wait at once, any other once `timeout` is over. Never
/// throws itself.
[[nodiscard]] WaitOutcome wait_for(SharedCounter& counter, uint32_t value, std::chrono::milliseconds timeout,
                                   const std::function<std::optional<Trouble>()>& trouble);

}  // namespace fsdpp::comm
