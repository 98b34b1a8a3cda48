#pragma once

#include <cstdint>

#include "fsdpp/device/cuda_stream.h"

namespace fsdpp::comm {

/// Most ranks of a board.
inline constexpr int kMaxBoardRanks = 16;

/// Signals between GPUs: counters that peers raise in each other's memory. Each rank has a pad of ranks *
/// channels counters, pad[r * channels + c]: how often rank r has signalled channel c to the owner of the
/// pad, modulo 2^32; and a counter of its own per channel: how often it has signalled. All are zero when a
/// group begins.
///
/// No number is baked into a kernel's arguments, so a captured graph of signals and waits can be replayed.
/// The view goes to kernels by value. Operations of one rank on one channel must be ordered by its streams;
/// channels are independent.
struct BoardView {
  uint32_t* pads[kMaxBoardRanks] = {};  // pads[r]: rank r's pad, as this device addresses it
  uint32_t* own = nullptr;              // this rank's counters [channels], device memory
  int rank = 0;
  int ranks = 0;
  int channels = 0;
};

/// Tells all peers, once more, on `channel`. What the stream did before is visible to a peer that has seen
/// it: the signal is a release, the wait an acquire, at system scope. Throws UsageError for a channel that
/// the board lacks; EnvironmentError if the launch fails. So does cuda_wait().
void cuda_signal(device::Stream stream, const BoardView& board, int channel);
/// The same on the channels first, first + stride, ... (`count` of them), in one launch.
void cuda_signal_all(device::Stream stream, const BoardView& board, int first, int stride, int count);

/// Later work of the stream runs when each of the ranks [first_rank, first_rank + count), ourselves excepted,
/// has signalled `channel` at least as often as we have ourselves (by the numbers' difference as signed
/// 32-bit numbers). Meanwhile `stands` (null, or pinned host memory) shows that number, or 1 for 0; before
/// and after, 0. Throws UsageError also for ranks that the board lacks.
void cuda_wait(device::Stream stream, const BoardView& board, int channel, int first_rank, int count,
               uint32_t* stands = nullptr);

/// Loads the kernels now. CUDA loads a kernel at its first launch, for which it may wait until the device is
/// idle: behind a wait that this process itself has yet to answer it would never return.
void load_signal_kernels();

}  // namespace fsdpp::comm
