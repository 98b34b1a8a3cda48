// The parts of comm that need no ranks: sums, limits on memory, processes, introductions.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/host_memory.h"
#include "fsdpp/comm/introduction.h"
#include "fsdpp/comm/process.h"
#include "fsdpp/comm/shared_counter.h"
#include "fsdpp/device/sum.h"
#include "tests/dist/gates.h"

namespace fsdpp::comm {
namespace {

using test::expect_contains;

// The sum one element at a time, each step rounded to fp32 (volatile keeps the compiler from joining steps).
float sum_of(const std::vector<std::vector<float>>& sources, size_t i, float scale, bool add, float before) {
  volatile float sum = sources.front()[i];
  for (size_t s = 1; s < sources.size(); ++s) sum = sum + sources[s][i];
  volatile float product = scale * sum;
  volatile float result = add ? before + product : product;
  return result;
}

TEST(Sum, HasTheBitsOfOneAdditionAfterTheOther) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> value(-1.0F, 1.0F);
  for (size_t ranks = 1; ranks <= 9; ++ranks) {
    for (const size_t count : {0, 1, 3, 64, 4095, 4096, 4097, 20001}) {
      std::vector<std::vector<float>> sources(ranks, std::vector<float>(count));
      for (auto& source : sources) {
        for (float& x : source) x = value(random) * std::exp2(static_cast<float>(random() % 20));
      }
      std::vector<const float*> starts;
      for (const auto& source : sources) starts.push_back(source.data());
      for (const bool add : {false, true}) {
        const float scale = 1.0F / 3.0F;
        std::vector<float> out(count + 1, 0.1F);
        const float unread = add ? 0.1F : std::numeric_limits<float>::quiet_NaN();
        std::fill_n(out.begin(), count, unread);
        device::sum_in_rank_order(out.data(), starts, static_cast<int64_t>(count), scale, add);
        for (size_t i = 0; i < count; ++i) {
          const float wanted = sum_of(sources, i, scale, add, 0.1F);
          ASSERT_EQ(std::memcmp(&out[i], &wanted, sizeof(float)), 0) << ranks << " ranks, element " << i;
        }
        EXPECT_EQ(out[count], 0.1F) << "written past the end";
      }
    }
  }
}

TEST(Sum, OfNothingIsZero) {
  std::vector<float> out = {1.0F, 2.0F};
  device::sum_in_rank_order(out.data(), {}, 2, 3.0F, true);
  EXPECT_EQ(out, (std::vector<float>{1.0F, 2.0F}));
  device::sum_in_rank_order(out.data(), {}, 2, 3.0F, false);
  EXPECT_EQ(out, (std::vector<float>{0.0F, 0.0F}));
}

TEST(SharedCounters, ATroubleSeenEarlierIsToldAtTheTimeout) {
  // A stopped peer that another rank has just ended looks alive for a moment: that must not be the last word.
  SharedCounter counter{};
  int asked = 0;
  const WaitOutcome outcome =
      wait_for(counter, 1, std::chrono::milliseconds(250), [&]() -> std::optional<Trouble> {
        if (asked++ > 0) return std::nullopt;
        return Trouble{"process 4711 is stopped", false};
      });
  EXPECT_EQ(outcome.result, WaitResult::timed_out);
  EXPECT_GT(asked, 1);
  ASSERT_TRUE(outcome.trouble);
  EXPECT_EQ(outcome.trouble->what, "process 4711 is stopped");
}

TEST(SharedCounters, NumbersWrapAround) {
  SharedCounter counter{};
  const auto alive = [] { return std::optional<Trouble>(); };
  raise(counter, UINT32_MAX);
  EXPECT_EQ(wait_for(counter, UINT32_MAX - 1, std::chrono::milliseconds(1), alive).result,
            WaitResult::reached);
  EXPECT_EQ(wait_for(counter, 0, std::chrono::milliseconds(1), alive).result, WaitResult::timed_out);
  raise(counter, 0);
  EXPECT_EQ(wait_for(counter, UINT32_MAX, std::chrono::milliseconds(1), alive).result, WaitResult::reached);
  EXPECT_EQ(wait_for(counter, 0, std::chrono::milliseconds(1), alive).result, WaitResult::reached);
}

/// A folder with the files of /proc and /sys that limits are read from.
class FakeRoot {
 public:
  FakeRoot() {
    std::string name = testing::TempDir() + "fsdpp-root-XXXXXX";
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  FakeRoot& file(const std::string& name, const std::string& text) {
    std::filesystem::create_directories((path_ + name).substr(0, (path_ + name).rfind('/')));
    std::ofstream(path_ + name) << text;
    return *this;
  }
  [[nodiscard]] AvailableMemory read() const { return available_memory(path_); }

 private:
  std::string path_;
};

constexpr const char* kMeminfo = "MemTotal:       2000 kB\nMemFree:        10 kB\nMemAvailable:   1000 kB\n";

TEST(HostMemory, TheLeastLimitCounts) {
  FakeRoot root;
  EXPECT_EQ(root.read().bytes, UINT64_MAX);
  root.file("/proc/meminfo", kMeminfo);
  EXPECT_EQ(root.read().bytes, 1000U * 1024);
  EXPECT_EQ(root.read().limit, "MemAvailable of /proc/meminfo");
  root.file("/proc/self/cgroup", "0::/a/b\n");
  EXPECT_EQ(root.read().bytes, 1000U * 1024) << "a cgroup without files limits nothing";
  root.file("/sys/fs/cgroup/a/b/memory.max", "max\n").file("/sys/fs/cgroup/a/b/memory.current", "500\n");
  EXPECT_EQ(root.read().bytes, 1000U * 1024);
  root.file("/sys/fs/cgroup/a/memory.max", "90000\n")
      .file("/sys/fs/cgroup/a/memory.current", "40000\n")
      .file("/sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 30000\n");
  EXPECT_EQ(root.read().bytes, 80000U) << "the cgroup above, with the page cache that can be dropped";
  EXPECT_EQ(root.read().limit, "the cgroup limit /sys/fs/cgroup/a/memory.max");
  root.file("/sys/fs/cgroup/memory.max", "1000\n").file("/sys/fs/cgroup/memory.current", "2000\n");
  EXPECT_EQ(root.read().bytes, 0U) << "over its limit already";
}

TEST(HostMemory, CgroupsOfVersion1) {
  FakeRoot root;
  root.file("/proc/meminfo", kMeminfo)
      .file("/proc/self/cgroup", "9:name=systemd:/x\n4:cpu,memory:/job/7\n0::/\n");
  root.file("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "70000\n")
      .file("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "50000\n")
      .file("/sys/fs/cgroup/memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 5000\n");
  EXPECT_EQ(root.read().bytes, 25000U);
  EXPECT_EQ(root.read().limit, "the cgroup limit /sys/fs/cgroup/memory/job/memory.limit_in_bytes");
}

TEST(HostMemory, TheErrorHasNumbersPurposeAndRemedy) {
  const AvailableMemory available{10000, "MemAvailable of /proc/meminfo"};
  check_memory(2500, 4, "weights", available);
  try {
    check_memory(2501, 4, "weights", available);
    ADD_FAILURE() << "10004 bytes of 10000 were given";
  } catch (const EnvironmentError& error) {
    for (const char* part :
         {"weights", "4 ranks", "2501 bytes", "10000 bytes", "MemAvailable", "fewer ranks"}) {
      expect_contains(error.what(), part);
    }
  }
}

TEST(Processes, ThisOneIsAlive) {
  EXPECT_EQ(own_process().pid, getpid());
  EXPECT_FALSE(trouble_with_process(own_process()));
}

TEST(Processes, AnotherWithTheSameNumberIsNotMeant) {
  ProcessId earlier = own_process();
  earlier.started -= 1;
  const auto trouble = trouble_with_process(earlier);
  ASSERT_TRUE(trouble);
  EXPECT_TRUE(trouble->final);
  end_if_stopped(earlier);
}

// A child that does nothing until it is killed.
pid_t start_child() {
  const pid_t child = fork();
  if (child == 0) {
    while (true) pause();
  }
  return child;
}

TEST(Processes, StoppedThenEndedThenGone) {
  const pid_t child = start_child();
  const auto state = process_state(child);
  ASSERT_TRUE(state);
  const ProcessId id = state->id;
  EXPECT_FALSE(trouble_with_process(id));
  end_if_stopped(id);  // runs: is left alone

  kill(child, SIGSTOP);
  ASSERT_EQ(waitpid(child, nullptr, WUNTRACED), child);
  auto trouble = trouble_with_process(id);
  ASSERT_TRUE(trouble);
  EXPECT_EQ(trouble->what, "process " + std::to_string(child) + " is stopped");
  EXPECT_FALSE(trouble->final);

  ProcessId other = id;
  other.started += 1;
  end_if_stopped(other);  // not the one meant: is left alone
  EXPECT_EQ(waitpid(child, nullptr, WNOHANG), 0);

  end_if_stopped(id);
  siginfo_t info{};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  trouble = trouble_with_process(id);  // not yet reaped
  ASSERT_TRUE(trouble);
  EXPECT_EQ(trouble->what, "process " + std::to_string(child) + " is gone");
  EXPECT_TRUE(trouble->final);

  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
  EXPECT_TRUE(trouble_with_process(id)->final);
}

Introduction introduction(int rank, const std::string& host, const std::string& boot,
                          const std::string& space) {
  return {rank, 2, {host, boot, space}, {4711 + rank, 99}, 5};
}

TEST(Introductions, SurviveTheStore) {
  const Introduction one = introduction(1, "a host", "boot-1", "pid:[1]");
  EXPECT_EQ(introduction_from(to_text(one)), one);
  EXPECT_EQ(introduction_from(to_text(introduction(1, "", "", ""))), introduction(1, "", "", ""));
  EXPECT_THROW(static_cast<void>(introduction_from("")), EnvironmentError);
  EXPECT_THROW(static_cast<void>(introduction_from("1 2 3 4 5\nhost")), EnvironmentError);
}

TEST(Introductions, RanksOnDifferentHostsAreRefusedByName) {
  const auto refused = [](const Introduction& a, const Introduction& b) -> std::string {
    const std::vector<Introduction> all = {a, b};
    try {
      require_one_host(all);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  };
  const Introduction first = introduction(0, "alpha", "boot-1", "pid:[1]");
  EXPECT_EQ(refused(first, introduction(1, "alpha", "boot-1", "pid:[1]")), "accepted");
  const std::string hosts = refused(first, introduction(1, "beta", "boot-2", "pid:[1]"));
  expect_contains(hosts, "rank 0 runs on host \"alpha\" and rank 1 on host \"beta\"");
  expect_contains(hosts, "shared memory cannot span hosts");
  expect_contains(refused(first, introduction(1, "alpha", "boot-2", "pid:[1]")),
                  "boot ids boot-1 and boot-2");
  expect_contains(refused(first, introduction(1, "beta", "boot-1", "pid:[2]")), "different containers");
  EXPECT_EQ(refused(first, introduction(1, "other-name", "boot-1", "pid:[1]")), "accepted");
  expect_contains(refused(introduction(0, "alpha", "", ""), introduction(1, "beta", "", "")),
                  "on host \"beta\"");
  Introduction other = introduction(1, "alpha", "boot-1", "pid:[1]");
  other.ranks = 3;
  expect_contains(refused(first, other), "one of 2 ranks, rank 1 as one of 3");
}

}  // namespace
}  // namespace fsdpp::comm
