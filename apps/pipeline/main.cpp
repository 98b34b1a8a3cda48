// A pipeline of 2 stages on 2 data ranks each, in one process: trains a small model under three schedules and
// compares its weights with one process's, bit for bit.
#include <ATen/Parallel.h>

#include <array>
#include <exception>
#include <iostream>
#include <mutex>

#include "apps/pipeline/stage.h"
#include "fsdpp/comm/connect.h"

namespace fsdpp::pipeline {
namespace {

constexpr int kStages = 2;
constexpr int kDataRanks = 2;
constexpr int kSteps = 3;
constexpr int kMicrobatches = 4;

/// Weights that differ from one process's, of all ranks.
int train(Schedule schedule, const std::vector<at::Tensor>& expected) {
  std::array<Mailbox, kDataRanks> mail;
  std::mutex mutex;
  int wrong = 0;
  comm::run_thread_ranks(kStages * kDataRanks, [&](comm::PeerGroup& all) {
    const int stage = all.rank() / kDataRanks;
    const auto data_ranks = all.part({stage * kDataRanks, stage * kDataRanks + 1}, "stage");
    Stage own(*data_ranks, mail[static_cast<std::size_t>(data_ranks->rank())], schedule, stage, kStages);
    for (int step = 0; step < kSteps; ++step) own.step(step, kMicrobatches);
    int differ = 0;
    for (const auto& [place, weights] : own.weights()) {
      const std::size_t first = static_cast<std::size_t>(place) * weights.size();
      for (std::size_t i = 0; i < weights.size(); ++i)
        differ += weights[i].equal(expected.at(first + i)) ? 0 : 1;
    }
    const std::lock_guard lock(mutex);
    wrong += differ;
  });
  return wrong;
}

int run() {
  at::set_num_threads(1);  // the ranks are threads already
  const std::vector<at::Tensor> expected = one_process(kSteps, kDataRanks, kMicrobatches);
  bool right = true;
  for (const Schedule schedule :
       {Schedule::one_forward_one_backward, Schedule::interleaved, Schedule::zero_bubble}) {
    const int wrong = train(schedule, expected);
    std::cout << to_string(schedule) << ": " << kStages << " stages x " << kDataRanks << " data ranks, "
              << kSteps << " steps of " << kMicrobatches << " microbatches: "
              << (wrong == 0 ? "the bits of one process" : text(wrong, " weights differ from one process's"))
              << "\n";
    right = right && wrong == 0;
  }
  return right ? 0 : 1;
}

}  // namespace
}  // namespace fsdpp::pipeline

int main() {
  try {
    return fsdpp::pipeline::run();
  } catch (const std::exception& error) {
    std::cerr << "pipeline: " << error.what() << "\n";
    return 1;
  }
}
