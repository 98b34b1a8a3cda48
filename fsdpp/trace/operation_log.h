#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "fsdpp/trace/vector_clock.h"

namespace fsdpp::trace {

/// Kind and name of every operation of all ranks, kept small: 8 bytes each, every name once.
class OperationLog {
 public:
  explicit OperationLog(int threads) : queues_(static_cast<std::size_t>(threads)) {}

  void add(int thread, const device::Operation& operation);
  [[nodiscard]] device::OperationKind kind(const Epoch& epoch) const { return find(epoch).kind; }
  [[nodiscard]] const std::string& name(const Epoch& epoch) const { return names_[find(epoch).name]; }
  /// The first position that was seen of a queue; 0: none.
  [[nodiscard]] uint64_t first_position(int thread) const { return queue(thread).first; }
  /// "reduce #12 run reduce layers.0 of rank 2"
  [[nodiscard]] std::string describe(const Epoch& epoch) const;

 private:
  struct Entry {
    uint32_t name = 0;
    device::OperationKind kind{};
  };
  struct Queue {
    uint64_t first = 0;
    std::vector<Entry> entries;  // from position `first`
  };
  [[nodiscard]] const Queue& queue(int thread) const { return queues_[static_cast<std::size_t>(thread)]; }
  [[nodiscard]] const Entry& find(const Epoch& epoch) const {
    return queue(epoch.thread).entries.at(epoch.position - queue(epoch.thread).first);
  }

  std::vector<Queue> queues_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, uint32_t> index_of_;
};

}  // namespace fsdpp::trace
