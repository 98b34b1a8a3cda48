#include "fsdpp/layout/placement.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>

#include "fsdpp/base/error.h"

namespace fsdpp::layout {
namespace {

constexpr Placement kPlacements[] = {Placement::replicate, Placement::partial, Placement::shard};

TEST(Placement, EveryPairHasItsTransitionOrIsRejectedByName) {
  const std::map<std::pair<Placement, Placement>, Transition> legal = {
      {{Placement::replicate, Placement::replicate}, Transition::none},
      {{Placement::partial, Placement::partial}, Transition::none},
      {{Placement::shard, Placement::shard}, Transition::none},
      {{Placement::shard, Placement::replicate}, Transition::gather},
      {{Placement::partial, Placement::shard}, Transition::reduce},
      {{Placement::partial, Placement::replicate}, Transition::all_reduce},
      {{Placement::replicate, Placement::shard}, Transition::slice},
  };
  int rejected = 0;
  for (const Placement from : kPlacements) {
    for (const Placement to : kPlacements) {
      const std::string pair = "from " + to_string(from) + " to " + to_string(to);
      SCOPED_TRACE(pair);
      const auto found = legal.find({from, to});
      if (found != legal.end()) {
        EXPECT_EQ(transition(from, to), found->second);
        continue;
      }
      ++rejected;
      try {
        static_cast<void>(transition(from, to));
        ADD_FAILURE() << "accepted";
      } catch (const UsageError& error) {
        EXPECT_NE(std::string(error.what()).find(pair), std::string::npos) << error.what();
      }
    }
  }
  EXPECT_EQ(rejected, 2);
}

TEST(Placement, NamesAreTheWordsOfTheCode) {
  EXPECT_EQ(to_string(Placement::replicate), "replicate");
  EXPECT_EQ(to_string(Placement::partial), "partial");
  EXPECT_EQ(to_string(Placement::shard), "shard");
  EXPECT_EQ(to_string(Transition::none), "none");
  EXPECT_EQ(to_string(Transition::gather), "gather");
  EXPECT_EQ(to_string(Transition::reduce), "reduce");
  EXPECT_EQ(to_string(Transition::all_reduce), "all_reduce");
  EXPECT_EQ(to_string(Transition::slice), "slice");
  EXPECT_EQ(to_string(static_cast<Placement>(9)), "Placement(9)");
  EXPECT_EQ(to_string(static_cast<Transition>(9)), "Transition(9)");
}

}  // namespace
}  // namespace fsdpp::layout
