#pragma once

#include <functional>
#include <vector>

#include "fsdpp/base/byte_range.h"
#include "fsdpp/trace/hazard.h"
#include "fsdpp/trace/interval_map.h"

namespace fsdpp::trace {

/// What is known of every byte that operations named: who wrote it last, who has read it since, and whether
/// it is alive. After FastTrack (Flanagan and Freund, 2009): of a queue, which runs in order, the last access
/// is enough, and a read that comes after another one stands for it.
///
/// Operations must come in an order that agrees with what orders them.
class ShadowMemory {
 public:
  struct Finding {
    HazardKind kind;
    Epoch first;  // position 0: none
    Epoch second;
    uintptr_t begin;  // the bytes in question
    std::size_t bytes;
    const char* why = nullptr;  // completes a finding of kind `life`
  };
  using Report = std::function<void(const Finding&)>;

  explicit ShadowMemory(Report report) : report_(std::move(report)) {}

  /// The operation at which `who` stands reads, writes, or copies from one range to another of equal size.
  /// A copy may copy bytes that were never written: they stay unwritten in the target.
  void read(const QueueClock& who, const ByteRange& range);
  void write(const QueueClock& who, const ByteRange& range);
  void copy(const QueueClock& who, const ByteRange& source, const ByteRange& target);
  void acquire(const QueueClock& who, const ByteRange& range);
  void release(const QueueClock& who, const ByteRange& range);
  void free(const QueueClock& who, const ByteRange& range);

  [[nodiscard]] std::size_t pieces() const noexcept { return map_.pieces(); }

 private:
  struct Cell {
    Epoch written;
    std::vector<Epoch> reads;  // since then, without those that another one stands for; by thread
    int life = -1;             // index into lives_; -1: never acquired
    bool unwritten = false;    // since the life began

    friend bool operator==(const Cell&, const Cell&) = default;
  };
  struct Life {
    ByteRange range;
    Epoch acquired;
    Epoch released;  // position 0: alive
    [[nodiscard]] bool alive() const noexcept { return released.position == 0; }
  };
  using Piece = IntervalMap<Cell>::Piece;

  // What a read, and what a write, must come after.
  void require_after_write(const QueueClock& who, const Piece& piece, const Cell& cell, HazardKind kind);
  void require_after_all(const QueueClock& who, const Piece& piece, const Cell& cell, HazardKind kind);
  bool require_alive(const QueueClock& who, const Piece& piece, const Cell& cell);
  void add_read(const QueueClock& who, Cell& cell);
  void end_life(const QueueClock& who, const Piece& piece, const Cell& cell, const ByteRange& range);
  [[nodiscard]] static HazardKind access_kind(const Epoch& first, const Epoch& second) noexcept;
  [[nodiscard]] Life& life_of(const Cell& cell) { return lives_[static_cast<std::size_t>(cell.life)]; }

  Report report_;
  IntervalMap<Cell> map_;
  std::vector<Life> lives_;
};

}  // namespace fsdpp::trace
