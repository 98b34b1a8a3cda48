#include "fsdpp/layout/shard_layout.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"

namespace fsdpp::layout {
namespace {

// Offsets are counted in blocks of kAlignment bytes until the total is known to fit: blocks cannot overflow.
constexpr int64_t kMaxBlocks = std::numeric_limits<int64_t>::max() / kAlignment;

// `value` / `unit`, rounded up, for value >= 0 and unit > 0; never overflows.
int64_t divide_up(int64_t value, int64_t unit) { return value / unit + (value % unit != 0 ? 1 : 0); }

// Indices of `numels`, big first, ties in list order.
std::vector<int> big_first(const std::vector<int64_t>& numels) {
  std::vector<int> order(numels.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return numels[a] > numels[b]; });
  return order;
}

// Each rank's segments: the parameters, taken in `order`, cut at every shard boundary they cross.
std::vector<std::vector<Segment>> cut(const std::vector<int>& order, const std::vector<int64_t>& offsets,
                                      const std::vector<int64_t>& numels, int64_t shard_numel, int ranks) {
  std::vector<std::vector<Segment>> segments(static_cast<size_t>(ranks));
  for (const int i : order) {
    for (int64_t done = 0; done < numels[i];) {
      const int64_t position = offsets[i] + done;
      const int64_t in_shard = position % shard_numel;
      const int64_t count = std::min(numels[i] - done, shard_numel - in_shard);
      segments[position / shard_numel].push_back({i, done, in_shard, count});
      done += count;
    }
  }
  return segments;
}

void check_index(const char* what, int64_t index, size_t count) {
  if (index >= 0 && index < static_cast<int64_t>(count)) return;
  throw std::out_of_range(
      text(what, " ", index, " is not in the layout; expected 0 to ", static_cast<int64_t>(count) - 1));
}

// The sizes: aligned, equal on all ranks, and every element either a parameter's or padding.
void check_sizes(const ShardLayout& layout) {
  FSDPP_INVARIANT(layout.ranks() >= 1, "ranks ", layout.ranks());
  FSDPP_INVARIANT(
      layout.shard_numel() >= 0 && layout.shard_numel() * layout.element_bytes() % kAlignment == 0,
      "shard of ", layout.shard_numel(), " elements of ", layout.element_bytes(), " bytes");
  int64_t owned = 0;
  for (int i = 0; i < static_cast<int>(layout.parameters().size()); ++i) {
    const Shape& shape = layout.parameters()[i];
    const int64_t offset = layout.parameter_offset(i);
    FSDPP_INVARIANT(offset >= 0 && offset * layout.element_bytes() % kAlignment == 0, to_string(shape),
                    " starts at element ", offset);
    FSDPP_INVARIANT(layout.parameter_numel(i) == numel(shape), to_string(shape), " laid out as ",
                    layout.parameter_numel(i), " elements");
    owned += layout.parameter_numel(i);
  }
  FSDPP_INVARIANT(layout.padding_numel() >= 0 && owned + layout.padding_numel() == layout.full_numel(), owned,
                  " elements and ", layout.padding_numel(), " of padding in ", layout.full_numel());
}

// The segments: in shard order without overlap, inside the shard, where the parameter's offset says, and each
// parameter's elements once, in order. Segments that do not overlap in the shards cannot in the full buffer.
void check_segments(const ShardLayout& layout) {
  std::vector<int64_t> covered(layout.parameters().size(), 0);
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    int64_t end = 0;
    for (const Segment& segment : layout.segments(rank)) {
      FSDPP_INVARIANT(segment.parameter >= 0 && segment.parameter < static_cast<int>(covered.size()), "rank ",
                      rank, " has a segment of parameter ", segment.parameter);
      const auto where = [&] {  // made only when a check fails
        return text("segment of ", to_string(layout.parameters()[segment.parameter]), " on rank ", rank,
                    " at ", segment.shard_offset);
      };
      FSDPP_INVARIANT(segment.count > 0 && segment.shard_offset >= end, where(), " overlaps what ends at ",
                      end);
      end = segment.shard_offset + segment.count;
      FSDPP_INVARIANT(end <= layout.shard_numel(), where(), " ends at ", end, " of ", layout.shard_numel());
      FSDPP_INVARIANT(rank * layout.shard_numel() + segment.shard_offset ==
                          layout.parameter_offset(segment.parameter) + segment.parameter_offset,
                      where(), " is not where the parameter's offset says");
      FSDPP_INVARIANT(segment.parameter_offset == covered[segment.parameter], where(), " starts at element ",
                      segment.parameter_offset, " where ", covered[segment.parameter], " are covered");
      covered[segment.parameter] += segment.count;
    }
  }
  for (int i = 0; i < static_cast<int>(covered.size()); ++i) {
    FSDPP_INVARIANT(covered[i] == layout.parameter_numel(i), to_string(layout.parameters()[i]), " has ",
                    covered[i], " of its elements covered");
  }
}

}  // namespace

ShardLayout ShardLayout::flat(std::vector<Shape> parameters, int64_t element_bytes, int ranks, int parts) {
  require(element_bytes == 1 || element_bytes == 2 || element_bytes == 4 || element_bytes == 8,
          "element_bytes is ", element_bytes,
          "; expected 1, 2, 4 or 8: pass the size of the parameters' dtype");
  require(ranks >= 1, "ranks is ", ranks,
          "; expected 1 or more: pass the number of ranks that share the unit");
  require(parts >= 1 && parts <= std::numeric_limits<int>::max() / ranks, "parts is ", parts,
          "; expected 1 or more, and ranks * parts within int");
  const int64_t block = kAlignment / element_bytes;  // elements

  ShardLayout layout;
  layout.element_bytes_ = element_bytes;
  for (const Shape& shape : parameters) layout.numels_.push_back(numel(shape));
  layout.parameters_ = std::move(parameters);
  layout.offsets_.assign(layout.numels_.size(), 0);
  const std::vector<int> order = big_first(layout.numels_);

  int64_t blocks = 0;
  for (const int i : order) {
    if (layout.numels_[i] == 0) continue;
    layout.offsets_[i] = blocks * block;
    const int64_t own = divide_up(layout.numels_[i], block);
    require(own <= kMaxBlocks - blocks, "parameter ", to_string(layout.parameters_[i]), " of ", element_bytes,
            "-byte elements takes the layout beyond int64 bytes; expected less than 2^63 in all: check its "
            "sizes");
    blocks += own;
  }
  const int64_t part_blocks = divide_up(blocks, int64_t{ranks} * parts);
  require(part_blocks <= kMaxBlocks / ranks / parts, "ranks is ", ranks,
          "; expected shards that together take less than ", "2^63 bytes: padded to equal shards, ", blocks,
          " blocks of ", kAlignment, " bytes do not fit");
  layout.shard_numel_ = part_blocks * parts * block;
  layout.segments_ = cut(order, layout.offsets_, layout.numels_, layout.shard_numel_, ranks);
  const int64_t owned = std::accumulate(layout.numels_.begin(), layout.numels_.end(), int64_t{0});
  layout.padding_numel_ = layout.full_numel() - owned;
  layout.check();
  return layout;
}

int ShardLayout::ranks() const noexcept { return static_cast<int>(segments_.size()); }

int64_t ShardLayout::element_bytes() const noexcept { return element_bytes_; }

std::span<const Shape> ShardLayout::parameters() const noexcept { return parameters_; }

int64_t ShardLayout::full_numel() const noexcept { return ranks() * shard_numel_; }

int64_t ShardLayout::shard_numel() const noexcept { return shard_numel_; }

int64_t ShardLayout::padding_numel() const noexcept { return padding_numel_; }

int64_t ShardLayout::parameter_offset(int parameter) const {
  check_index("parameter", parameter, offsets_.size());
  return offsets_[parameter];
}

int64_t ShardLayout::parameter_numel(int parameter) const {
  check_index("parameter", parameter, numels_.size());
  return numels_[parameter];
}

std::span<const Segment> ShardLayout::segments(int rank) const {
  check_index("rank", rank, segments_.size());
  return segments_[rank];
}

void ShardLayout::check() const {
  check_sizes(*this);
  check_segments(*this);
}

}  // namespace fsdpp::layout
