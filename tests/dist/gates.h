#pragma once

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>

namespace fsdpp::test {

using Clock = std::chrono::steady_clock;

inline std::chrono::milliseconds since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in: " << text;
}

inline long own_tid() { return syscall(SYS_gettid); }

/// Returns once thread `tid` of this process (0: not yet known) sleeps in the kernel: a gate for "it waits
/// now".
inline void until_asleep(const std::atomic<long>& tid) {
  while (tid.load() == 0) std::this_thread::yield();
  const std::string path = "/proc/self/task/" + std::to_string(tid.load()) + "/stat";
  while (true) {
    std::string line;
    std::ifstream file(path);
    std::getline(file, line);
    const size_t name_end = line.rfind(") ");
    if (name_end != std::string::npos && line[name_end + 2] == 'S') return;
    std::this_thread::yield();
  }
}

}  // namespace fsdpp::test
