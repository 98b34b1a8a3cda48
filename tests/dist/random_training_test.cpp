// Trainings in every way that can be drawn, beside one process that shards nothing. FSDPP_RANDOM_SEEDS says
// how many; a failure names its seed, which FSDPP_RANDOM_SEED runs alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "tests/dist/random_training.h"

namespace fsdpp::test {
namespace {

constexpr unsigned kSeeds = 120;
constexpr unsigned kSeedsOfATest = 10;

unsigned number_in(const char* variable, unsigned otherwise) {
  const char* given = std::getenv(variable);
  return given == nullptr ? otherwise : static_cast<unsigned>(std::strtoul(given, nullptr, 10));
}

unsigned first_seed() { return number_in("FSDPP_RANDOM_SEED", 1); }
unsigned end_of_seeds() {
  const bool alone = std::getenv("FSDPP_RANDOM_SEED") != nullptr;
  return first_seed() + (alone ? 1 : number_in("FSDPP_RANDOM_SEEDS", kSeeds));
}

void train(unsigned seed) {
  Draw draw(seed);
  const RandomConfig config = random_config(draw);
  const auto script_seed = static_cast<unsigned>(draw.below(1 << 30));
  std::vector<std::string> scripts(static_cast<std::size_t>(config.ranks));
  watch_replicas(config.replicas);
  try {
    run_watched_ranks(config.ranks, [&](comm::PeerGroup& group) {
      RandomTraining training(config, script_seed, group);
      training.run();
      scripts[static_cast<std::size_t>(group.rank())] = training.script();
    });
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  watch_replicas(1);
  if (testing::Test::HasFailure())
    std::cerr << "seed " << seed << ": " << describe(config) << "\n" << scripts.front() << "\n";
}

class RandomTrainings : public testing::TestWithParam<unsigned> {};

TEST_P(RandomTrainings, HaveTheNumbersOfOneProcess) {
  const unsigned end = std::min(GetParam() + kSeedsOfATest, end_of_seeds());
  for (unsigned seed = GetParam(); seed < end; ++seed) {
    train(seed);
    if (HasFailure()) break;
  }
}

INSTANTIATE_TEST_SUITE_P(From, RandomTrainings, testing::Range(first_seed(), end_of_seeds(), kSeedsOfATest),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace fsdpp::test
