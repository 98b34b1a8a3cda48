#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>

namespace fsdpp::trace {

/// Values over ranges of addresses: ranges are cut where an update begins or ends inside them, and joined
/// again when neighbours come to hold equal values. What was never set holds Value{}.
template <class Value>
class IntervalMap {
 public:
  struct Piece {
    uintptr_t first;
    uintptr_t end;
  };

  /// Calls `change(piece, value&)` for every piece of [first, end), gaps included, in order of addresses.
  template <class Change>
  void update(uintptr_t first, uintptr_t end, Change&& change) {
    if (first >= end) return;
    auto entry = cut_at(first);
    uintptr_t at = first;
    while (at < end) {
      if (entry == entries_.end() || entry->first > at) {  // a gap
        const uintptr_t stop = entry == entries_.end() ? end : std::min(end, entry->first);
        entry = entries_.emplace_hint(entry, at, Entry{stop, Value{}});
      } else if (entry->second.end > end) {
        cut_at(end);
      }
      change(Piece{at, entry->second.end}, entry->second.value);
      at = entry->second.end;
      ++entry;
    }
    join(first, end);
  }

  /// Calls `look(piece, value)` for every piece of [first, end) that holds a value.
  template <class Look>
  void look(uintptr_t first, uintptr_t end, Look&& look) const {
    auto entry = entries_.upper_bound(first);
    if (entry != entries_.begin() && std::prev(entry)->second.end > first) --entry;
    for (; entry != entries_.end() && entry->first < end; ++entry) {
      look(Piece{std::max(first, entry->first), std::min(end, entry->second.end)}, entry->second.value);
    }
  }

  /// Forgets [first, end).
  void erase(uintptr_t first, uintptr_t end) {
    if (first >= end) return;
    const auto from = cut_at(first);
    entries_.erase(from, cut_at(end));
  }

  [[nodiscard]] std::size_t pieces() const noexcept { return entries_.size(); }

 private:
  struct Entry {
    uintptr_t end;
    Value value;
  };
  using Iterator = typename std::map<uintptr_t, Entry>::iterator;

  // The first entry that begins at `address` or behind it, after an entry around it was cut in two there.
  Iterator cut_at(uintptr_t address) {
    auto after = entries_.lower_bound(address);
    if (after == entries_.begin()) return after;
    const auto before = std::prev(after);
    if (before->second.end <= address) return after;
    const uintptr_t end = std::exchange(before->second.end, address);
    return entries_.emplace_hint(after, address, Entry{end, before->second.value});
  }

  // Equal neighbours become one, from the one before `first` to the one at `end`.
  void join(uintptr_t first, uintptr_t end) {
    auto entry = entries_.lower_bound(first);
    if (entry != entries_.begin()) --entry;
    while (entry != entries_.end()) {
      const auto next = std::next(entry);
      if (next == entries_.end() || next->first > end) return;
      if (entry->second.end == next->first && entry->second.value == next->second.value) {
        entry->second.end = next->second.end;
        entries_.erase(next);
      } else {
        entry = next;
      }
    }
  }

  std::map<uintptr_t, Entry> entries_;
};

}  // namespace fsdpp::trace
