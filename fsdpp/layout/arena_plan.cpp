#include "fsdpp/layout/arena_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"

namespace fsdpp::layout {
namespace {

// Lifetimes sorted by their first step, those that meet joined to one.
std::vector<Lifetime> joined(std::vector<Lifetime> lifetimes) {
  std::sort(lifetimes.begin(), lifetimes.end(),
            [](const Lifetime& a, const Lifetime& b) { return a.first < b.first; });
  std::vector<Lifetime> out;
  for (const Lifetime& lifetime : lifetimes) {
    if (out.empty() || lifetime.first > out.back().last) {
      out.push_back(lifetime);
    } else {
      out.back().last = std::max(out.back().last, lifetime.last);
    }
  }
  return out;
}

// True when two joined lists have a step in common.
bool meet(const std::vector<Lifetime>& a, const std::vector<Lifetime>& b) {
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    if (a[i].last < b[j].first) {
      ++i;
    } else if (b[j].last < a[i].first) {
      ++j;
    } else {
      return true;
    }
  }
  return false;
}

// The largest sum of `bytes` alive at one step.
int64_t peak(const std::vector<std::vector<Lifetime>>& lives, const std::vector<int64_t>& bytes) {
  struct Change {
    int64_t step;
    bool ends;  // at the end of the step, so behind what begins with it
    int64_t bytes;
  };
  std::vector<Change> changes;
  for (size_t i = 0; i < lives.size(); ++i) {
    for (const Lifetime& life : lives[i]) {
      changes.push_back({life.first, false, bytes[i]});
      changes.push_back({life.last, true, -bytes[i]});
    }
  }
  std::sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) {
    return std::pair(a.step, a.ends) < std::pair(b.step, b.ends);
  });
  int64_t alive = 0;
  int64_t most = 0;
  for (const Change& change : changes) most = std::max(most, alive += change.bytes);
  return most;
}

// The lowest offset where `bytes` fit between the `taken` [begin, end) ranges.
int64_t lowest_free(std::vector<std::pair<int64_t, int64_t>> taken, int64_t bytes) {
  std::sort(taken.begin(), taken.end());
  int64_t offset = 0;
  for (const auto& [begin, end] : taken) {
    if (begin - offset >= bytes) break;
    offset = std::max(offset, end);
  }
  return offset;
}

// Bytes of each buffer, rounded up to the alignment. Throws UsageError for illegal buffers.
std::vector<int64_t> aligned_bytes(const std::vector<PlannedBuffer>& buffers) {
  std::vector<int64_t> out;
  // A buffer rests on one that meets it, that on a third, down to 0: no offset exceeds the sum of all sizes,
  // and a sum that fits makes everything below fit. One unit short of the most: round_up adds it on its way.
  int64_t rest = (std::numeric_limits<int64_t>::max() / kAlignment - 1) * kAlignment;
  for (const PlannedBuffer& buffer : buffers) {
    require(buffer.bytes >= 0, "buffer '", buffer.name, "' has ", buffer.bytes,
            " bytes; expected 0 or more: pass its size");
    for (const Lifetime& life : buffer.lifetimes) {
      require(life.first <= life.last, "buffer '", buffer.name, "' lives from step ", life.first, " to step ",
              life.last,
              "; expected a lifetime that ends no earlier than it begins: both steps are included");
    }
    require(
        buffer.bytes <= rest, "buffer '", buffer.name, "' of ", buffer.bytes,
        " bytes takes the sum of all buffers beyond int64; expected less than 2^63 in all: check its size");
    out.push_back(round_up(buffer.bytes, kAlignment));
    rest -= out.back();
  }
  return out;
}

}  // namespace

ArenaPlan ArenaPlan::build(std::vector<PlannedBuffer> buffers) {
  const std::vector<int64_t> bytes = aligned_bytes(buffers);
  std::vector<std::vector<Lifetime>> lives;
  for (const PlannedBuffer& buffer : buffers) lives.push_back(joined(buffer.lifetimes));

  ArenaPlan plan;
  plan.buffers_ = std::move(buffers);
  plan.offsets_.assign(bytes.size(), 0);
  plan.lower_bound_bytes_ = peak(lives, bytes);

  std::vector<int> order(bytes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return bytes[a] > bytes[b]; });
  for (size_t placed = 0; placed < order.size(); ++placed) {
    const int i = order[placed];
    std::vector<std::pair<int64_t, int64_t>> taken;
    for (size_t k = 0; k < placed; ++k) {
      const int other = order[k];
      if (meet(lives[i], lives[other])) {
        taken.emplace_back(plan.offsets_[other], plan.offsets_[other] + bytes[other]);
      }
    }
    plan.offsets_[i] = lowest_free(std::move(taken), bytes[i]);
    plan.bytes_ = std::max(plan.bytes_, plan.offsets_[i] + bytes[i]);
  }
  plan.check();
  return plan;
}

std::span<const PlannedBuffer> ArenaPlan::buffers() const noexcept { return buffers_; }

int64_t ArenaPlan::offset(int buffer) const {
  if (buffer < 0 || buffer >= static_cast<int>(offsets_.size())) {
    throw std::out_of_range(text("buffer ", buffer, " is not in the plan; expected 0 to ",
                                 static_cast<int64_t>(offsets_.size()) - 1));
  }
  return offsets_[buffer];
}

int64_t ArenaPlan::bytes() const noexcept { return bytes_; }

int64_t ArenaPlan::lower_bound_bytes() const noexcept { return lower_bound_bytes_; }

bool ArenaPlan::share_bytes(int a, int b) const {
  const int64_t first_a = offset(a);
  const int64_t first_b = offset(b);
  return first_a < first_b + buffers_[b].bytes && first_b < first_a + buffers_[a].bytes;
}

bool ArenaPlan::same_places(const ArenaPlan& other) const noexcept {
  return offsets_ == other.offsets_ &&
         std::equal(buffers_.begin(), buffers_.end(), other.buffers_.begin(), other.buffers_.end(),
                    [](const PlannedBuffer& a, const PlannedBuffer& b) { return a.bytes == b.bytes; });
}

void ArenaPlan::check() const {
  FSDPP_INVARIANT(offsets_.size() == buffers_.size(), offsets_.size(), " offsets");
  FSDPP_INVARIANT(bytes_ % kAlignment == 0 && bytes_ >= lower_bound_bytes_, bytes_, " bytes where ",
                  lower_bound_bytes_, " live at once");
  for (int a = 0; a < static_cast<int>(buffers_.size()); ++a) {
    const PlannedBuffer& one = buffers_[a];
    FSDPP_INVARIANT(offsets_[a] >= 0 && offsets_[a] % kAlignment == 0 && offsets_[a] + one.bytes <= bytes_,
                    "'", one.name, "' at ", offsets_[a], " in an arena of ", bytes_);
    for (int b = 0; b < a; ++b) {
      if (!share_bytes(a, b)) continue;
      const PlannedBuffer& other = buffers_[b];
      for (const Lifetime& x : one.lifetimes) {
        for (const Lifetime& y : other.lifetimes) {
          FSDPP_INVARIANT(x.last < y.first || y.last < x.first, "'", one.name, "' and '", other.name,
                          "' share bytes and live at one time, from step ", std::max(x.first, y.first));
        }
      }
    }
  }
}

}  // namespace fsdpp::layout
