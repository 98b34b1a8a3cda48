// What the ranks of comm_process_test do. Each is this program started again; see rank_process.h.
#include <dirent.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "fsdpp/comm/connect.h"

namespace fsdpp::comm {
namespace {

std::string variable(const char* name, const char* otherwise = "") {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

std::chrono::milliseconds timeout() {
  return std::chrono::milliseconds(std::stoi(variable("FSDPP_TEST_TIMEOUT_MS", "30000")));
}

// A line that the test waits for.
void say(const std::string& line) { std::cout << line << "\n" << std::flush; }

void await_go() {
  std::string line;
  std::getline(std::cin, line);
}

// Where the victim of a test stands when it is hit; the others go on into waiting for it.
void at(const std::string& point, int rank) {
  if (variable("FSDPP_TEST_POINT") != point || variable("FSDPP_TEST_VICTIM") != std::to_string(rank)) return;
  say("at " + point);
  await_go();
}

void check(bool holds, const char* what) {
  if (!holds) throw std::logic_error(std::string("does not hold: ") + what);
}

// Inodes of this process's shared mappings, for the test to look for later.
std::string mapped_inodes() {
  std::string inodes = "inodes";
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:fsdpp") == std::string::npos) continue;
    std::istringstream fields(line);
    std::string range, access, offset, device, inode;
    fields >> range >> access >> offset >> device >> inode;
    inodes += " " + inode;
  }
  return inodes;
}

int open_memory_files() {
  int count = 0;
  DIR* const folder = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(folder)) {
    char target[256] = {};
    if (readlinkat(dirfd(folder), entry->d_name, target, sizeof(target) - 1) <= 0) continue;
    count += std::string(target).rfind("/memfd:fsdpp", 0) == 0 ? 1 : 0;
  }
  closedir(folder);
  return count;
}

void use_memory(PeerGroup& group) {
  constexpr size_t kBytes = 3 << 20;
  const auto memory = group.allocate(kBytes, "a test");
  check(open_memory_files() == 0, "no memory file stays open once all ranks have mapped it");
  std::byte* const own = memory->peer(group.rank());
  check(std::count(own, own + kBytes, std::byte{0}) == kBytes, "memory is zero-filled");
  group.barrier();
  std::fill_n(own, kBytes, std::byte(group.rank() + 1));
  group.barrier();
  for (int peer = 0; peer < group.ranks(); ++peer) {
    const std::byte* const theirs = memory->peer(peer);
    check(std::count(theirs, theirs + kBytes, std::byte(peer + 1)) == kBytes, "every peer's bytes are seen");
  }
  group.barrier();
  const int next = (group.rank() + 1) % group.ranks();
  memory->peer(next)[7] = std::byte(100 + group.rank());
  group.barrier();
  const int previous = (group.rank() + group.ranks() - 1) % group.ranks();
  check(own[7] == std::byte(100 + previous), "a peer's write is seen");
}

void use_group() {
  const auto group = connect(timeout());
  check(group->describe() == "shared memory", "ranks that are processes share memory");
  use_memory(*group);
  for (int i = 0; i < 500; ++i) group->barrier();
  for (int i = 0; i < 100; ++i) {
    const std::vector<double> all = group->exchange(std::vector<double>{1.0 * group->rank(), 1.0 * i});
    for (int peer = 0; peer < group->ranks(); ++peer) {
      check(all[static_cast<size_t>(2 * peer)] == peer && all[static_cast<size_t>(2 * peer + 1)] == i,
            "exchange");
    }
  }
  const auto board = group->signals({"ready"}, "test");
  for (uint32_t i = 1; i <= 200; ++i) {
    board->signal(0, i);
    for (int peer = 0; peer < group->ranks(); ++peer) board->wait(peer, 0, i);
  }
  say("done");
}

void connect_twice() {
  connect(timeout())->barrier();
  connect(timeout())->barrier();
  say("done");
}

void points() {
  const int rank = std::stoi(variable("RANK"));
  at("start", rank);
  const auto group = connect(timeout());
  const auto board = group->signals({"ready"}, "unit");
  say(mapped_inodes());
  at("allocate", rank);
  const auto memory = group->allocate(1 << 20, "gradient slots");
  at("barrier", rank);
  group->barrier();
  at("wait", rank);
  board->signal(0, 1);
  for (int peer = 0; peer < group->ranks(); ++peer) board->wait(peer, 0, 1);
  say("done");
}

void huge() { static_cast<void>(connect(timeout())->allocate(size_t{1} << 50, "gradient slots")); }

void sizes() {
  const auto group = connect(timeout());
  static_cast<void>(
      group->allocate(group->rank() == 1 ? 8192 : 4096, "part " + std::to_string(group->rank())));
}

const std::map<std::string, std::function<void()>> kBodies = {{"use_group", use_group},
                                                              {"points", points},
                                                              {"huge", huge},
                                                              {"sizes", sizes},
                                                              {"connect_twice", connect_twice}};

// Exit codes that tell the kinds of errors apart.
int run(const std::string& name) {
  catch_interrupts();
  const auto report = [](int code, const char* kind, const std::exception& error) {
    std::cerr << kind << ": " << error.what() << std::endl;
    return code;
  };
  try {
    kBodies.at(name)();
    return 0;
  } catch (const PeerError& error) {
    return report(10, "PeerError", error);
  } catch (const EnvironmentError& error) {
    return report(11, "EnvironmentError", error);
  } catch (const UsageError& error) {
    return report(12, "UsageError", error);
  } catch (const Interrupted& error) {
    return report(13, "Interrupted", error);
  } catch (const std::exception& error) {
    return report(1, "error", error);
  }
}

}  // namespace
}  // namespace fsdpp::comm

int main(int argc, char** argv) {
  if (const char* const body = std::getenv("FSDPP_TEST_BODY")) return fsdpp::comm::run(body);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
