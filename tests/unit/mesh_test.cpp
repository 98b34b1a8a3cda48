#include "fsdpp/layout/mesh.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "fsdpp/base/error.h"

namespace fsdpp::layout {
namespace {

// The message of the UsageError that a mesh of these axes throws; empty when it is accepted.
std::string rejection(std::vector<Axis> axes) {
  try {
    const Mesh mesh(std::move(axes));
    return "";
  } catch (const UsageError& error) {
    return error.what();
  }
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Mesh, LastAxisIsTheFastest) {
  const Mesh mesh({{"node", 2}, {"lane", 3}, {"chip", 4}});
  EXPECT_EQ(mesh.ranks(), 24);
  EXPECT_EQ(mesh.axes().size(), 3u);
  EXPECT_EQ(mesh.axis("node"), 0);
  EXPECT_EQ(mesh.axis("chip"), 2);
  EXPECT_EQ(mesh.coordinate(0), (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(mesh.coordinate(1), (std::vector<int>{0, 0, 1}));
  EXPECT_EQ(mesh.coordinate(4), (std::vector<int>{0, 1, 0}));
  EXPECT_EQ(mesh.coordinate(23), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(mesh.group(17, 0), (std::vector<int>{5, 17}));
  EXPECT_EQ(mesh.group(17, 1), (std::vector<int>{13, 17, 21}));
  EXPECT_EQ(mesh.group(17, 2), (std::vector<int>{16, 17, 18, 19}));
}

TEST(Mesh, OneRankIsAMesh) {
  const Mesh mesh({{"shard", 1}});
  EXPECT_EQ(mesh.ranks(), 1);
  EXPECT_EQ(mesh.coordinate(0), std::vector<int>{0});
  EXPECT_EQ(mesh.group(0, 0), std::vector<int>{0});
}

// Against the definition: ranks counted by a row-major odometer, groups found by comparing all coordinates.
void check_against_definition(const Mesh& mesh) {
  const int axes = static_cast<int>(mesh.axes().size());
  std::vector<std::vector<int>> coordinates;
  std::vector<int> odometer(axes, 0);
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    ASSERT_EQ(mesh.coordinate(rank), odometer) << "rank " << rank;
    coordinates.push_back(odometer);
    for (int axis = axes - 1; axis >= 0; --axis) {
      if (++odometer[axis] < mesh.axes()[axis].size) break;
      odometer[axis] = 0;
    }
  }
  ASSERT_EQ(odometer, std::vector<int>(axes, 0)) << "ranks() is not the number of coordinates";
  for (int axis = 0; axis < axes; ++axis) {
    for (int rank = 0; rank < mesh.ranks(); ++rank) {
      std::vector<int> expected;
      for (int other = 0; other < mesh.ranks(); ++other) {
        std::vector<int> moved = coordinates[other];
        moved[axis] = coordinates[rank][axis];
        if (moved == coordinates[rank]) expected.push_back(other);
      }
      ASSERT_EQ(mesh.group(rank, axis), expected) << "rank " << rank << " axis " << axis;
    }
  }
}

TEST(Mesh, RandomMeshesFollowTheDefinition) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::vector<Axis> axes;
    int ranks = 1;
    for (uint64_t i = 0, count = 1 + random() % 4; i < count; ++i) {
      const int size = std::min(static_cast<int>(1 + random() % 6), 64 / ranks);
      axes.push_back({std::string(1, static_cast<char>('a' + i)), size});
      ranks *= size;
    }
    const Mesh mesh(axes);
    ASSERT_EQ(mesh.ranks(), ranks);
    check_against_definition(mesh);
    if (HasFatalFailure()) return;
  }
}

TEST(Mesh, IllegalAxesAreRejectedByName) {
  EXPECT_TRUE(contains(rejection({}), "no axes"));
  EXPECT_TRUE(contains(rejection({{"a", 2}, {"", 2}}), "axis 1"));
  EXPECT_TRUE(
      contains(rejection({{"a", 2}, {"b", 2}, {"a", 3}}), "axes 0 and 2 of the mesh are both called 'a'"));
  EXPECT_TRUE(contains(rejection({{"a", 2}, {"tensor", 0}}), "axis 'tensor' of the mesh has the size 0"));
  EXPECT_TRUE(contains(rejection({{"a", -3}}), "axis 'a' of the mesh has the size -3"));
  EXPECT_TRUE(contains(rejection({{"a", 65536}, {"wide", 32768}}), "axis 'wide'"));
  EXPECT_TRUE(contains(rejection({{"a", 2147483647}, {"b", 2147483647}, {"c", 4}}), "axis 'b'"));
  EXPECT_EQ(rejection({{"a", 65536}, {"b", 32767}}), "");
  EXPECT_EQ(Mesh({{"a", 2147483647}, {"b", 1}}).ranks(), 2147483647);
}

TEST(Mesh, UnknownAxisListsTheAxesThereAre) {
  const Mesh mesh({{"replica", 2}, {"shard", 4}});
  try {
    static_cast<void>(mesh.axis("shards"));
    FAIL() << "accepted";
  } catch (const UsageError& error) {
    EXPECT_TRUE(contains(error.what(), "'shards'")) << error.what();
    EXPECT_TRUE(contains(error.what(), "replica (2), shard (4)")) << error.what();
  }
}

TEST(Mesh, UnknownRanksAndIndicesThrow) {
  const Mesh mesh({{"replica", 2}, {"shard", 4}});
  EXPECT_THROW(static_cast<void>(mesh.coordinate(-1)), std::out_of_range);
  EXPECT_THROW(static_cast<void>(mesh.coordinate(8)), std::out_of_range);
  EXPECT_THROW(static_cast<void>(mesh.group(8, 0)), std::out_of_range);
  EXPECT_THROW(static_cast<void>(mesh.group(-1, 0)), std::out_of_range);
  EXPECT_THROW(static_cast<void>(mesh.group(0, -1)), std::out_of_range);
  EXPECT_THROW(static_cast<void>(mesh.group(0, 2)), std::out_of_range);
}

}  // namespace
}  // namespace fsdpp::layout
