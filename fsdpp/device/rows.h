#pragma once

#include <cstdint>
#include <span>

#include "fsdpp/device/element.h"

namespace fsdpp::device {

/// Most ranks that a table is cut over.
inline constexpr int kMaxRowRanks = 16;

/// A table of rows * dim elements, cut as one flat run: element e is at shards[e / shard_elements][e %
/// shard_elements]. A cut may lie inside a row, and a row may span several shards.
struct RowTable {
  const void* shards[kMaxRowRanks] = {};  // each aligned to its element, at its best to 256 bytes
  int64_t shard_elements = 0;
  int64_t rows = 0;
  int64_t dim = 0;
  Element element = Element::bf16;
};

/// Gradients of looked-up rows: rank r's are [counts[r], dim], one row for each of its ids, in the ids'
/// order.
struct RowGradients {
  const void* gradients[kMaxRowRanks] = {};  // aligned to their element, at their best to 16 bytes
  int64_t counts[kMaxRowRanks] = {};
  int ranks = 0;
  int64_t dim = 0;
  Element element = Element::bf16;
};

/// All ranks' ids, together in rank order, sorted: sorted[i] is the id at position order[i]. Equal ids keep
/// their order (a stable sort). `total` is the sum of the ranks' counts.
struct SortedIds {
  const int64_t* sorted = nullptr;
  const int64_t* order = nullptr;
  int64_t total = 0;
};

/// The run of the flat table that a rank owns: fp32 sums for the elements [begin, begin + count). Rows
/// touched add to, or replace, what is there; others stay as they are.
struct RowSums {
  float* sums = nullptr;
  int64_t begin = 0;
  int64_t count = 0;
};

/// out[i] = row ids[i] of the table, for 0 <= i < n: `out` is [n, dim] of the table's element.
/// Throws UsageError for an id outside [0, rows).
void gather_rows(void* out, std::span<const int64_t> ids, const RowTable& table);

/// For each row among the ids and each of its elements e that `out` owns:
///   out[e] = (add_to_out ? out[e] : 0) + scale * (((g0 + g1) + g2) + ...)
/// over the row's occurrences in rank order, then in position order; in fp32, with a rounding after each
/// operation, so the bits are the same on every device. Gradients of elements that `out` does not own are not
/// read.
void add_rows(const RowSums& out, const SortedIds& ids, const RowGradients& gradients, float scale,
              bool add_to_out);

}  // namespace fsdpp::device
