// Gathers and reduces 64 MiB of fp32 over process ranks that share memory; bench_comm.py starts it and sets
// it beside gloo. One process per rank (torchrun's variables). Commands on standard input, one a line:
//   check        verifies the bits of a gather and of a reduce
//   gather N     N gathers: each rank ends with all ranks' parts, 64 MiB, in memory of its own
//   reduce N     N reduces: each rank ends with the sum over ranks, in rank order, of its part of 64 MiB
//   quit
// Answers each with one line of JSON, {"ms": [...]} being this rank's times, the closing barrier included.
#include <chrono>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/device/sum.h"

namespace {

using fsdpp::comm::PeerGroup;

constexpr int64_t kFull = (int64_t{64} << 20) / static_cast<int64_t>(sizeof(float));  // elements

// What rank `rank` holds at element `i` of its 64 MiB: differs between ranks and is not exact to add.
float value(int rank, int64_t i) { return 0.1F * static_cast<float>((i * 7 + rank * 13) % 1009) + 0.01F; }

class Bench {
 public:
  explicit Bench(PeerGroup& group)
      : group_(group),
        part_(kFull / group.ranks()),
        memory_(group.allocate(kFull * sizeof(float), "benchmark buffers")),
        full_(kFull, -1.0F),
        sum_(static_cast<size_t>(part_), -1.0F) {
    for (int64_t i = 0; i < kFull; ++i) own()[i] = value(group_.rank(), i);
    for (int peer = 0; peer < group_.ranks(); ++peer) slices_.push_back(of(peer) + part_ * group_.rank());
    group_.barrier();
  }

  // Every rank publishes the first part of its memory. Starting with itself, each rank reads another peer at
  // a time.
  void gather() {
    for (int step = 0; step < group_.ranks(); ++step) {
      const int peer = (group_.rank() + step) % group_.ranks();
      std::memcpy(full_.data() + part_ * peer, of(peer), static_cast<size_t>(part_) * sizeof(float));
    }
    group_.barrier();  // peers may write again
  }

  void reduce() {
    fsdpp::device::sum_in_rank_order(sum_.data(), slices_, part_, 1.0F, false);
    group_.barrier();
  }

  void check() {
    gather();
    for (int64_t i = 0; i < kFull; ++i) {
      expect(full_[static_cast<size_t>(i)] == value(static_cast<int>(i / part_), i % part_), "gather", i);
    }
    reduce();
    for (int64_t i = 0; i < part_; ++i) {
      const int64_t at = part_ * group_.rank() + i;
      volatile float sum = value(0, at);
      for (int peer = 1; peer < group_.ranks(); ++peer) sum = sum + value(peer, at);
      expect(sum_[static_cast<size_t>(i)] == sum, "reduce", i);
    }
  }

  std::vector<double> time(int count, void (Bench::*what)()) {
    std::vector<double> ms;
    for (int i = 0; i < count; ++i) {
      group_.barrier();
      const auto start = std::chrono::steady_clock::now();
      (this->*what)();
      ms.push_back(
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    return ms;
  }

 private:
  [[nodiscard]] float* of(int rank) const { return reinterpret_cast<float*>(memory_->peer(rank)); }
  [[nodiscard]] float* own() const { return of(group_.rank()); }
  void expect(bool right, const char* what, int64_t i) const {
    if (!right)
      throw std::runtime_error(fsdpp::text("wrong ", what, " at element ", i, " on rank ", group_.rank()));
  }

  PeerGroup& group_;
  int64_t part_;  // elements per rank
  std::shared_ptr<fsdpp::comm::PeerMemory> memory_;
  std::vector<float> full_;
  std::vector<float> sum_;
  std::vector<const float*> slices_;  // this rank's part in every peer's memory
};

void serve(Bench& bench) {
  for (std::string line; std::getline(std::cin, line) && line != "quit";) {
    std::istringstream words(line);
    std::string command;
    int count = 0;
    words >> command >> count;
    std::vector<double> ms;
    if (command == "check") {
      bench.check();
    } else if (command == "gather" || command == "reduce") {
      ms = bench.time(count, command == "gather" ? &Bench::gather : &Bench::reduce);
    } else {
      throw fsdpp::UsageError("unknown command \"" + line + "\", expected check, gather N, reduce N or quit");
    }
    std::cout << "{\"ms\": [";
    for (size_t i = 0; i < ms.size(); ++i) std::cout << (i > 0 ? ", " : "") << ms[i];
    std::cout << "]}" << std::endl;
  }
}

}  // namespace

int main() {
  try {
    const auto group = fsdpp::comm::connect();
    fsdpp::require(kFull % group->ranks() == 0, "64 MiB do not divide by ", group->ranks(), " ranks");
    Bench bench(*group);
    serve(bench);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "bench_comm: " << error.what() << std::endl;
    return 1;
  }
}
