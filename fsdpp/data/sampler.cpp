#include "fsdpp/data/sampler.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>

#include "fsdpp/base/error.h"
#include "fsdpp/data/hash.h"
#include "fsdpp/data/permutation.h"

namespace fsdpp::data {

Sampler::Sampler(std::span<const Token> tokens, int64_t sequence, int64_t global_batch, uint64_t seed)
    : Sampler(tokens, sequence, global_batch, seed, Order::shuffled) {}

Sampler Sampler::validation(std::span<const Token> tokens, int64_t sequence, int64_t global_batch) {
  return {tokens, sequence, global_batch, 0, Order::textual};
}

Sampler::Sampler(std::span<const Token> tokens, int64_t sequence, int64_t global_batch, uint64_t seed,
                 Order order)
    : tokens_(tokens), sequence_(sequence), global_batch_(global_batch), seed_(seed), order_(order) {
  const auto count = static_cast<int64_t>(tokens.size());
  require(sequence >= 1, "sequence ", sequence, ": give at least 1 token");
  require(global_batch >= 1, "global batch ", global_batch, ": give at least 1 sequence");
  require(
      count > sequence, "sequence ", sequence, " is longer than the ",
      order == Order::shuffled ? "training" : "validation", " text: ", count,
      " tokens, and one more than the sequence is needed (the last target); shorten the sequence, give more "
      "text or change the split");
  if (order == Order::shuffled) {
    // One window fewer than fit leaves room for every shift, so all epochs have the same number of windows.
    epoch_windows_ = std::max<int64_t>(1, (count - sequence) / sequence);
    shifts_ = std::min(sequence, count - epoch_windows_ * sequence);
  } else {
    epoch_windows_ = (count - 1) / sequence;
  }
}

int64_t Sampler::full_batches() const noexcept {
  return std::max<int64_t>(1, epoch_windows_ / global_batch_);
}

void Sampler::check(int64_t ranks, int64_t microbatches) const {
  require(ranks >= 1, "ranks ", ranks, ": give at least 1");
  require(microbatches >= 1, "microbatches ", microbatches, ": give at least 1");
  const bool divides =
      ranks <= global_batch_ && microbatches <= global_batch_ && global_batch_ % (ranks * microbatches) == 0;
  require(divides, "global batch ", global_batch_, " does not divide into ", ranks, " ranks * ", microbatches,
          " microbatches; make the batch a multiple of their product or change either");
}

std::vector<int64_t> Sampler::windows(int64_t step) const { return rows(step, 0, global_batch_); }

Batch Sampler::batch(int64_t step, int64_t rank, int64_t ranks, int64_t microbatch,
                     int64_t microbatches) const {
  check(ranks, microbatches);
  require(rank >= 0 && rank < ranks, "rank ", rank, " of ", ranks, ": give 0 to ", ranks - 1);
  require(microbatch >= 0 && microbatch < microbatches, "microbatch ", microbatch, " of ", microbatches,
          ": give 0 to ", microbatches - 1);
  const int64_t count = global_batch_ / (ranks * microbatches);
  const std::vector<int64_t> starts = rows(step, (rank * microbatches + microbatch) * count, count);

  Batch batch{at::empty({count, sequence_}, at::kLong), at::empty({count, sequence_}, at::kLong)};
  auto* inputs = batch.inputs.mutable_data_ptr<int64_t>();
  auto* targets = batch.targets.mutable_data_ptr<int64_t>();
  for (const int64_t start : starts) {
    const Token* window = tokens_.data() + start;
    inputs = std::copy_n(window, sequence_, inputs);
    targets = std::copy_n(window + 1, sequence_, targets);
  }
  return batch;
}

std::vector<int64_t> Sampler::rows(int64_t step, int64_t first, int64_t count) const {
  const int64_t last_step = std::numeric_limits<int64_t>::max() / global_batch_ - 1;
  require(step >= 0 && step <= last_step, "step ", step, ": give 0 to ", last_step);
  std::vector<int64_t> starts(static_cast<size_t>(count));
  for (int64_t row = 0; row < count; ++row) {
    const int64_t sample = step * global_batch_ + first + row;
    const int64_t epoch = sample / epoch_windows_;
    int64_t window = sample % epoch_windows_;
    if (order_ == Order::shuffled) {
      window = Permutation(epoch_windows_, mix(seed_) ^ static_cast<uint64_t>(epoch))(window);
    }
    starts[static_cast<size_t>(row)] = window_shift(epoch) + window * sequence_;
  }
  return starts;
}

int64_t Sampler::window_shift(int64_t epoch) const noexcept {
  const uint64_t draw = mix(mix(~seed_) ^ static_cast<uint64_t>(epoch));
  return static_cast<int64_t>(draw % static_cast<uint64_t>(shifts_));
}

}  // namespace fsdpp::data
