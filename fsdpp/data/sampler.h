#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdpp/data/tokenizer.h"

namespace fsdpp::data {

/// Inputs and targets of one microbatch: CPU, int64, [rows, sequence], contiguous. Each target is the token
/// after its input.
struct Batch {
  at::Tensor inputs;
  at::Tensor targets;
};

/// Which tokens each step, rank and microbatch sees: a pure function of (tokens, sequence, global batch,
/// seed) and of the step. Holds no state and no copy of the tokens, which must outlive it. Any thread may
/// call.
///
/// Row w of step s is sample s * global_batch + w. Rank r of W takes the W-th part of the rows, from r * B /
/// W on, so any world size sees the same global batches.
class Sampler {
 public:
  /// For training. An epoch visits every window once, in an order of its own; inputs do not overlap. Each
  /// epoch shifts all windows by an offset of its own below `sequence`, so that cuts fall elsewhere. Throws
  /// UsageError when `sequence` or `global_batch` is below 1 or a sequence and its last target do not fit
  /// into the tokens.
  Sampler(std::span<const Token> tokens, int64_t sequence, int64_t global_batch, uint64_t seed);

  /// For validation: windows in text order, from the first token. Take steps 0 .. full_batches()-1.
  /// Throws as the constructor does.
  [[nodiscard]] static Sampler validation(std::span<const Token> tokens, int64_t sequence,
                                          int64_t global_batch);

  /// Throws UsageError unless the global batch divides evenly into ranks * microbatches.
  void check(int64_t ranks, int64_t microbatches) const;

  /// First token of each row of step's global batch; row i reads tokens [start, start + sequence]. Pure.
  /// Throws UsageError when step < 0.
  [[nodiscard]] std::vector<int64_t> windows(int64_t step) const;

  /// The rows of one rank's microbatch: rows [first, first + n) of the global batch, where n = global_batch /
  /// (ranks * microbatches) and first = (rank * microbatches + microbatch) * n. Throws UsageError for a batch
  /// that does not divide, and for a rank, microbatch or step out of range.
  [[nodiscard]] Batch batch(int64_t step, int64_t rank, int64_t ranks, int64_t microbatch = 0,
                            int64_t microbatches = 1) const;

  [[nodiscard]] int64_t sequence() const noexcept { return sequence_; }
  [[nodiscard]] int64_t global_batch() const noexcept { return global_batch_; }
  /// Windows of one epoch; at least 1.
  [[nodiscard]] int64_t epoch_windows() const noexcept { return epoch_windows_; }
  /// Batches of one epoch that hold no window twice; 1 where the tokens fill less than one batch, whose rows
  /// then repeat windows.
  [[nodiscard]] int64_t full_batches() const noexcept;

 private:
  enum class Order { shuffled, textual };
  Sampler(std::span<const Token> tokens, int64_t sequence, int64_t global_batch, uint64_t seed, Order order);
  [[nodiscard]] std::vector<int64_t> rows(int64_t step, int64_t first, int64_t count) const;
  [[nodiscard]] int64_t window_shift(int64_t epoch) const noexcept;

  std::span<const Token> tokens_;
  int64_t sequence_;
  int64_t global_batch_;
  uint64_t seed_;
  Order order_;
  int64_t epoch_windows_ = 0;
  int64_t shifts_ = 1;  // an epoch's shift is below this
};

}  // namespace fsdpp::data
