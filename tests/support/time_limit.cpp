// Linked into test programs that ctest runs as a whole: each of their tests has a time limit all the same,
// FSDPP_TEST_LIMIT_S seconds; without it none. Who exceeds it is named, and the program is aborted.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

namespace {

class TimeLimit final : public testing::EmptyTestEventListener {
 public:
  explicit TimeLimit(std::chrono::seconds limit) : limit_(limit) {}

  void OnTestStart(const testing::TestInfo& test) override {
    running_ = true;
    watch_ = std::thread(
        [this, name = std::string(test.test_suite_name()) + "." + test.name()] { watch_over(name); });
  }

  void OnTestEnd(const testing::TestInfo& /*test*/) override {
    {
      const std::lock_guard lock(mutex_);
      running_ = false;
    }
    ended_.notify_one();
    watch_.join();
  }

 private:
  void watch_over(const std::string& name) {
    std::unique_lock lock(mutex_);
    if (ended_.wait_for(lock, limit_, [this] { return !running_; })) return;
    std::fprintf(stderr, "%s has run for %lld s, its limit\n", name.c_str(),
                 static_cast<long long>(limit_.count()));
    std::abort();
  }

  std::chrono::seconds limit_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::thread watch_;
  bool running_ = false;
};

const bool kWatching = [] {
  const char* limit = std::getenv("FSDPP_TEST_LIMIT_S");
  if (limit == nullptr) return false;
  testing::UnitTest::GetInstance()->listeners().Append(new TimeLimit(std::chrono::seconds(std::atoi(limit))));
  return true;
}();

}  // namespace
