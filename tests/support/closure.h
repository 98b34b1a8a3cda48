#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/schedule.h"

namespace fsdpp::test {

/// The rules of the hazard checker by brute force, to check the checker: reachability between all operations
/// as a matrix of bits, and memory cut once into the finest ranges that any operation names, each with the
/// list of its accesses, of which all pairs are compared. No clocks, no interval map, nothing forgotten.
/// Collectives and states are left out.
class Closure {
 public:
  explicit Closure(const Schedule& schedule);

  /// The first rule found broken, as text; empty: none is.
  [[nodiscard]] std::string broken();

 private:
  enum class Use { read, write, copy_in, acquire, release, free };
  struct Access {
    std::size_t step;
    Use use;
  };
  struct Cell {  // one finest range
    bool alive = false;
    bool ended = false;
    bool unwritten = false;
    std::size_t life = 0;  // the step that began it
  };

  void add_edge(std::size_t from, std::size_t to) { before_[to].push_back(from); }
  void find_edges();
  bool order_steps();
  void close();
  void cut_memory();
  bool cut_copies_alike();
  void check_counters();
  void check_wait(std::size_t step, const std::vector<std::size_t>& own);
  void check_rejoins();
  void check_lives();
  void check_life(std::size_t step, std::size_t cell, Use use);
  void check_pairs();
  void check_copy(const ByteRange& source, const ByteRange& target);
  void fail(const std::string& what) {
    if (broken_.empty()) broken_ = what;
  }
  [[nodiscard]] std::size_t cell_at(uintptr_t address) const;
  template <class Visit>
  void each_cell(const ByteRange& range, Visit&& visit) const;
  [[nodiscard]] bool reaches(std::size_t from, std::size_t to) const {
    return (reach_[to][from / 64] >> (from % 64) & 1) != 0;
  }
  [[nodiscard]] std::string name(std::size_t step) const;

  const Schedule& schedule_;
  std::string broken_;
  std::vector<std::vector<std::size_t>> before_;    // per step: direct predecessors
  std::vector<std::vector<std::size_t>> releases_;  // per wait_signal: the signal that lets it go
  std::vector<std::size_t> order_;                  // steps, one order in which they may be issued
  std::vector<std::vector<uint64_t>> reach_;        // per step: bits of all that come before it
  std::vector<uintptr_t> edges_;                    // addresses where finest ranges begin
  std::vector<Cell> cells_;
  std::vector<std::vector<Access>> accesses_;  // per finest range, in order_
};

}  // namespace fsdpp::test
