#include "fsdpp/trace/shadow_memory.h"

#include <algorithm>

namespace fsdpp::trace {

HazardKind ShadowMemory::access_kind(const Epoch& first, const Epoch& second) noexcept {
  const bool of_host =
      lane_of(first.thread) == device::LaneKind::host || lane_of(second.thread) == device::LaneKind::host;
  return of_host ? HazardKind::host_early : HazardKind::unordered;
}

void ShadowMemory::require_after_write(const QueueClock& who, const Piece& piece, const Cell& cell,
                                       HazardKind kind) {
  if (who.covers(cell.written)) return;
  if (kind == HazardKind::unordered) kind = access_kind(cell.written, who.now());
  report_({kind, cell.written, who.now(), piece.first, piece.end - piece.first});
}

void ShadowMemory::require_after_all(const QueueClock& who, const Piece& piece, const Cell& cell,
                                     HazardKind kind) {
  require_after_write(who, piece, cell, kind);
  for (const Epoch& read : cell.reads) {
    if (who.covers(read)) continue;
    const HazardKind found = kind == HazardKind::unordered ? access_kind(read, who.now()) : kind;
    report_({found, read, who.now(), piece.first, piece.end - piece.first});
  }
}

bool ShadowMemory::require_alive(const QueueClock& who, const Piece& piece, const Cell& cell) {
  if (cell.life < 0 || life_of(cell).alive()) return true;
  report_({HazardKind::use_after_release, life_of(cell).released, who.now(), piece.first,
           piece.end - piece.first});
  return false;
}

void ShadowMemory::add_read(const QueueClock& who, Cell& cell) {
  std::erase_if(cell.reads, [&](const Epoch& read) { return who.covers(read); });
  const auto place = std::lower_bound(cell.reads.begin(), cell.reads.end(), who.now().thread,
                                      [](const Epoch& read, int thread) { return read.thread < thread; });
  cell.reads.insert(place, who.now());
}

void ShadowMemory::read(const QueueClock& who, const ByteRange& range) {
  map_.update(range.first(), range.end(), [&](const Piece& piece, Cell& cell) {
    if (require_alive(who, piece, cell)) require_after_write(who, piece, cell, HazardKind::unordered);
    if (cell.unwritten) {
      const Epoch begun = cell.life < 0 ? Epoch{} : life_of(cell).acquired;
      report_({HazardKind::unwritten_read, begun, who.now(), piece.first, piece.end - piece.first});
    }
    add_read(who, cell);
  });
}

void ShadowMemory::write(const QueueClock& who, const ByteRange& range) {
  map_.update(range.first(), range.end(), [&](const Piece& piece, Cell& cell) {
    if (require_alive(who, piece, cell)) require_after_all(who, piece, cell, HazardKind::unordered);
    cell.written = who.now();
    cell.reads.clear();
    cell.unwritten = false;
  });
}

void ShadowMemory::copy(const QueueClock& who, const ByteRange& source, const ByteRange& target) {
  std::vector<Piece> unwritten;  // of the source
  map_.update(source.first(), source.end(), [&](const Piece& piece, Cell& cell) {
    if (require_alive(who, piece, cell)) require_after_write(who, piece, cell, HazardKind::unordered);
    if (cell.unwritten) unwritten.push_back(piece);
    add_read(who, cell);
  });
  write(who, target);
  for (const Piece& piece : unwritten) {
    map_.update(piece.first - source.first() + target.first(), piece.end - source.first() + target.first(),
                [](const Piece&, Cell& cell) { cell.unwritten = true; });
  }
}

void ShadowMemory::acquire(const QueueClock& who, const ByteRange& range) {
  const int life = static_cast<int>(lives_.size());
  lives_.push_back({.range = range, .acquired = who.now(), .released = {}});
  map_.update(range.first(), range.end(), [&](const Piece& piece, Cell& cell) {
    if (cell.life >= 0 && life_of(cell).alive()) {
      report_({HazardKind::life, life_of(cell).acquired, who.now(), piece.first, piece.end - piece.first,
               "begins a life inside one that has not ended"});
    } else {
      require_after_all(who, piece, cell, HazardKind::early_reuse);
    }
    cell = {.written = who.now(), .reads = {}, .life = life, .unwritten = true};
  });
}

void ShadowMemory::end_life(const QueueClock& who, const Piece& piece, const Cell& cell,
                            const ByteRange& range) {
  const std::size_t bytes = piece.end - piece.first;
  if (cell.life < 0) {
    report_({HazardKind::life, {}, who.now(), piece.first, bytes, "ends a life that never began"});
    return;
  }
  Life& life = life_of(cell);
  if (!life.alive() && life.released != who.now()) {
    report_({HazardKind::life, life.released, who.now(), piece.first, bytes, "ends a life a second time"});
  } else if (life.range.first() < range.first() || life.range.end() > range.end()) {
    report_({HazardKind::life, life.acquired, who.now(), piece.first, bytes, "ends only a part of a life"});
  }
  life.released = who.now();
}

void ShadowMemory::release(const QueueClock& who, const ByteRange& range) {
  map_.update(range.first(), range.end(), [&](const Piece& piece, Cell& cell) {
    end_life(who, piece, cell, range);
    require_after_all(who, piece, cell, HazardKind::early_release);
    cell.written = who.now();
    cell.reads.clear();
  });
}

void ShadowMemory::free(const QueueClock& who, const ByteRange& range) {
  map_.look(range.first(), range.end(), [&](const Piece& piece, const Cell& cell) {
    require_after_all(who, piece, cell, HazardKind::early_release);
  });
  map_.erase(range.first(), range.end());
}

}  // namespace fsdpp::trace
