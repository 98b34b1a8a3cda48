// Ranks as processes over shared memory: that it works, and how it ends when one rank is killed, stopped or
// wrong.
#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <ostream>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/rendezvous.h"
#include "fsdpp/comm/socket.h"
#include "tests/dist/gates.h"
#include "tests/dist/rank_process.h"

namespace fsdpp::test {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLimit(30000);
constexpr int kPeerError = 10;
constexpr int kEnvironmentError = 11;
constexpr int kUsageError = 12;
constexpr int kInterrupted = 13;

void expect_all_end(std::vector<RankProcess>& ranks, int status) {
  for (RankProcess& rank : ranks) EXPECT_EQ(rank.wait(kLimit), status) << rank.output();
}

// The inodes of shared memory that a rank said it had mapped.
std::set<std::string> inodes_of(const RankProcess& rank) {
  std::istringstream lines(rank.output());
  std::set<std::string> inodes;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word;
    if (!(words >> word) || word != "inodes") continue;
    while (words >> word) inodes.insert(word);
  }
  return inodes;
}

// How many mappings or open files of any process still hold one of our memory files.
int left_behind(const std::set<std::string>& inodes) {
  int count = 0;
  DIR* const all = opendir("/proc");
  while (const dirent* process = readdir(all)) {
    std::ifstream maps("/proc/" + std::string(process->d_name) + "/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find("/memfd:fsdpp") == std::string::npos) continue;
      std::istringstream fields(line);
      std::string range, access, offset, device, inode;
      fields >> range >> access >> offset >> device >> inode;
      count += static_cast<int>(inodes.count(inode));
    }
  }
  closedir(all);
  return count;
}

std::set<std::string> named_segments() {
  std::set<std::string> names;
  if (DIR* const folder = opendir("/dev/shm")) {
    while (const dirent* entry = readdir(folder)) {
      if (std::string(entry->d_name).find("fsdpp") != std::string::npos) names.insert(entry->d_name);
    }
    closedir(folder);
  }
  return names;
}

TEST(CommProcess, RanksReachEachOthersMemory) {
  for (int count = 1; count <= 4; ++count) {
    auto ranks = start_ranks("use_group", count, free_port());
    expect_all_end(ranks, 0);
    for (const RankProcess& rank : ranks) EXPECT_EQ(rank.output(), "done\n");
  }
}

TEST(CommProcess, OneRankNeedsNoLauncher) {
  RankProcess rank(Variables{{"FSDPP_TEST_BODY", "use_group"}});
  EXPECT_EQ(rank.wait(kLimit), 0) << rank.output();
}

TEST(CommProcess, ALaunchersStoreServesTheRanksAndTheirRestart) {
  const comm::StoreServer store;
  for (const char* restarts : {"0", "1"}) {
    auto ranks =
        start_ranks("connect_twice", 3, store.port(),
                    {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", restarts}});
    expect_all_end(ranks, 0);
  }
}

TEST(CommProcess, ASecondJobInTheSameStoreIsToldSo) {
  const comm::StoreServer store;
  const Variables agent = {{"TORCHELASTIC_USE_AGENT_STORE", "True"}};
  auto first = start_ranks("use_group", 2, store.port(), agent);
  expect_all_end(first, 0);
  auto second = start_ranks("use_group", 2, store.port(), agent);
  expect_all_end(second, kEnvironmentError);
  for (const RankProcess& rank : second) expect_contains(rank.output(), "another job uses this store");
}

TEST(CommProcess, ASecondJobOnTheSamePortIsToldSo) {
  const int port = free_port();
  auto first = start_ranks("use_group", 2, port, {}, {0});  // serves the store and waits for its rank 1
  comm::await_listener("127.0.0.1", port, kLimit);
  auto second = start_ranks("use_group", 2, port, {}, {0});
  EXPECT_EQ(second[0].wait(kLimit), kEnvironmentError);
  expect_contains(second[0].output(), "127.0.0.1:" + std::to_string(port));
  expect_contains(second[0].output(), "another job uses this port: set MASTER_PORT to a free one");
  auto rest = start_ranks("use_group", 2, port, {}, {1});
  expect_all_end(rest, 0);
  expect_all_end(first, 0);
}

TEST(CommProcess, AStoreThatDoesNotAnswerIsNamedInTime) {
  const int port = free_port();
  const Variables timeout = {{"FSDPP_TEST_TIMEOUT_MS", "1000"}};
  const auto start = Clock::now();
  auto refused = start_ranks("use_group", 2, port, timeout, {1});
  EXPECT_EQ(refused[0].wait(kLimit), kEnvironmentError);
  expect_contains(refused[0].output(),
                  "no store answers at 127.0.0.1:" + std::to_string(port) + " within 1000 ms");
  EXPECT_LT(since(start), milliseconds(5000));

  const int socket = comm::listen_on("127.0.0.1", 0);  // the kernel accepts, nobody answers
  auto silent = start_ranks("use_group", 2, comm::port_of(socket), timeout, {1});
  EXPECT_EQ(silent[0].wait(kLimit), kEnvironmentError);
  expect_contains(silent[0].output(), "accepts connections but does not answer");
  close(socket);
}

TEST(CommProcess, AStoppedServerOfTheStoreDoesNotHoldUpTheOthers) {
  const int port = free_port();
  const Variables timeout = {{"FSDPP_TEST_TIMEOUT_MS", "2000"}};
  auto server = start_ranks("use_group", 3, port, timeout, {0});
  comm::await_listener("127.0.0.1", port, kLimit);
  server[0].send(SIGSTOP);
  const auto start = Clock::now();
  auto others = start_ranks("use_group", 3, port, timeout, {1, 2});
  expect_all_end(others, kEnvironmentError);
  EXPECT_LT(since(start), milliseconds(8000));
  for (const RankProcess& rank : others) expect_contains(rank.output(), "does not answer");
}

TEST(CommProcess, RanksThatNeverStartAreNamed) {
  auto ranks = start_ranks("use_group", 4, free_port(), {{"FSDPP_TEST_TIMEOUT_MS", "1000"}}, {0, 2});
  EXPECT_EQ(ranks[0].wait(kLimit), kPeerError);
  expect_contains(ranks[0].output(), "waited for 4 ranks");
  expect_contains(ranks[0].output(), "missing after 1000 ms: rank 1, 3");
  EXPECT_NE(ranks[1].wait(kLimit), 0);
}

TEST(CommProcess, TooMuchMemoryIsAnErrorOnEveryRank) {
  auto ranks = start_ranks("huge", 2, free_port());
  expect_all_end(ranks, kEnvironmentError);
  for (const RankProcess& rank : ranks) {
    expect_contains(rank.output(),
                    "not enough memory for gradient slots: 2 ranks of this host need 1125899906842624");
    expect_contains(rank.output(), "available");
    expect_contains(rank.output(), "use a smaller model or batch");
  }
}

TEST(CommProcess, DifferentSizesAreAnErrorOnEveryRank) {
  auto ranks = start_ranks("sizes", 3, free_port());
  expect_all_end(ranks, kUsageError);
  for (const RankProcess& rank : ranks) {
    expect_contains(rank.output(), "rank 0 4096 bytes for part 0, rank 1 8192 bytes for part 1");
  }
}

TEST(CommProcess, DifferentNumbersOfRanksAreAnErrorOnEveryRank) {
  const int port = free_port();
  auto ranks = start_ranks("use_group", 2, port);
  auto third = start_ranks("use_group", 3, port, {{"FSDPP_TEST_TIMEOUT_MS", "2000"}}, {2});
  expect_all_end(ranks, 0);  // a rank too many does not disturb the others
  EXPECT_NE(third[0].wait(kLimit), 0);
}

struct Hit {
  const char* point;
  int victim;
  friend void PrintTo(const Hit& hit, std::ostream* out) { *out << hit.point << " of rank " << hit.victim; }
};

class Hits : public testing::TestWithParam<Hit> {};
INSTANTIATE_TEST_SUITE_P(CommProcess, Hits,
                         testing::Values(Hit{"allocate", 0}, Hit{"allocate", 2}, Hit{"barrier", 0},
                                         Hit{"barrier", 2}, Hit{"wait", 0}, Hit{"wait", 2}),
                         [](const auto& info) {
                           return std::string(info.param.point) + std::to_string(info.param.victim);
                         });

// Starts three ranks, brings the victim to its point, hits it with `signal` and checks that the others end in
// time and name it, at least one of them with `trouble`. Nothing may stay.
void hit(const Hit& where, int signal, milliseconds timeout, milliseconds limit, const std::string& trouble) {
  const std::set<std::string> before = named_segments();
  auto ranks = start_ranks("points", 3, free_port(),
                           {{"FSDPP_TEST_POINT", where.point},
                            {"FSDPP_TEST_VICTIM", std::to_string(where.victim)},
                            {"FSDPP_TEST_TIMEOUT_MS", std::to_string(timeout.count())}});
  RankProcess& victim = ranks[static_cast<size_t>(where.victim)];
  ASSERT_TRUE(victim.printed("at " + std::string(where.point))) << victim.output();
  victim.send(signal);
  const auto start = Clock::now();
  std::set<std::string> inodes;
  int told = 0;
  for (RankProcess& rank : ranks) {
    if (rank.pid() == victim.pid()) continue;
    EXPECT_EQ(rank.wait(kLimit), kPeerError) << rank.output();
    const std::string lost =
        text("lost rank ", where.victim, ": process ", victim.pid(), " is ");  // "gone" once another ended it
    expect_contains(rank.output(), lost);
    told += rank.output().find(lost + trouble) != std::string::npos ? 1 : 0;
    expect_contains(rank.output(), "group \"world\"");
    EXPECT_EQ(rank.output().find("done"), std::string::npos);
    inodes.merge(inodes_of(rank));
  }
  EXPECT_LT(since(start), limit);
  EXPECT_GE(told, 1);
  EXPECT_EQ(victim.wait(kLimit), -SIGKILL);  // a stopped one was ended by those who gave up on it
  EXPECT_GE(inodes.size(), 3U);
  EXPECT_EQ(left_behind(inodes), 0);
  EXPECT_EQ(named_segments(), before);
}

TEST_P(Hits, AKilledRankIsNoticedAtOnce) {
  hit(GetParam(), SIGKILL, milliseconds(20000), milliseconds(5000), "gone");
}

TEST_P(Hits, AStoppedRankIsNamedWithinTwiceTheTimeoutAndEnded) {
  hit(GetParam(), SIGSTOP, milliseconds(1500), milliseconds(3000), "stopped");
}

TEST(CommProcess, ARankKilledBeforeItConnectsIsMissed) {
  auto ranks = start_ranks(
      "points", 3, free_port(),
      {{"FSDPP_TEST_POINT", "start"}, {"FSDPP_TEST_VICTIM", "1"}, {"FSDPP_TEST_TIMEOUT_MS", "1500"}});
  ASSERT_TRUE(ranks[1].printed("at start"));
  ranks[1].send(SIGKILL);
  EXPECT_EQ(ranks[0].wait(kLimit), kPeerError) << ranks[0].output();
  expect_contains(ranks[0].output(), "missing after 1500 ms: rank 1");
  EXPECT_NE(ranks[2].wait(kLimit), 0);
}

TEST(CommProcess, RanksToldToStopSayWhatTheyWaitedFor) {
  auto ranks =
      start_ranks("points", 3, free_port(), {{"FSDPP_TEST_POINT", "wait"}, {"FSDPP_TEST_VICTIM", "2"}});
  ASSERT_TRUE(ranks[2].printed("at wait"));
  for (const int waiting : {0, 1}) ranks[static_cast<size_t>(waiting)].send(SIGINT);
  const auto start = Clock::now();
  for (const int waiting : {0, 1}) {
    RankProcess& rank = ranks[static_cast<size_t>(waiting)];
    EXPECT_EQ(rank.wait(kLimit), kInterrupted) << rank.output();
    expect_contains(rank.output(),
                    "asked to stop while rank " + std::to_string(waiting) + " of group \"world\"");
    expect_contains(rank.output(), "channel \"unit: ready\"");
  }
  EXPECT_LT(since(start), milliseconds(2000));
}

TEST(CommProcess, AnInterruptEndsTheSearchForTheStore) {
  auto ranks =
      start_ranks("points", 2, free_port(), {{"FSDPP_TEST_POINT", "start"}, {"FSDPP_TEST_VICTIM", "1"}}, {1});
  ASSERT_TRUE(ranks[0].printed("at start"));  // signals are caught from here on
  ranks[0].send(SIGTERM);
  ranks[0].say("go");
  EXPECT_EQ(ranks[0].wait(milliseconds(5000)), kInterrupted) << ranks[0].output();
}

TEST(CommProcess, AJobThatIsPutAsideAndGoesOnBlamesNobody) {
  constexpr milliseconds kTimeout(2000);
  auto ranks = start_ranks("points", 3, free_port(),
                           {{"FSDPP_TEST_POINT", "wait"},
                            {"FSDPP_TEST_VICTIM", "2"},
                            {"FSDPP_TEST_TIMEOUT_MS", std::to_string(kTimeout.count())}});
  ASSERT_TRUE(ranks[2].printed("at wait"));
  for (const RankProcess& rank : ranks) rank.send(SIGSTOP);
  std::this_thread::sleep_for(kTimeout + milliseconds(500));  // the time itself is what is tested
  for (const RankProcess& rank : ranks) rank.send(SIGCONT);
  ranks[2].say("go");
  expect_all_end(ranks, 0);
}

}  // namespace
}  // namespace fsdpp::test
