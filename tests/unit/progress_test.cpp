#include "fsdpp/observe/progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <sstream>

namespace fsdpp::observe {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const Progress::Clock::time_point kStart{};

StepFigures at_step(int64_t step) {
  return {.step = step,
          .steps = 200,
          .loss = 2.10341,
          .gradient_norm = 0.873,
          .learning_rate = 3e-3,
          .tokens_per_s = 12345,
          .memory_bytes = 151 << 20,
          .seconds_left = 80};
}

TEST(Progress, PlainLineSaysEverything) {
  EXPECT_EQ(plain_line(at_step(40)),
            "step 40/200  loss 2.1034  norm 0.873  lr 3.00e-03  12.3k tokens/s  151.00 MiB  left 1:20");
}

TEST(Progress, Seconds) {
  EXPECT_EQ(human_seconds(0), "0 s");
  EXPECT_EQ(human_seconds(59.4), "59 s");
  EXPECT_EQ(human_seconds(59.6), "1:00");
  EXPECT_EQ(human_seconds(187), "3:07");
  EXPECT_EQ(human_seconds(3723), "1:02:03");
  EXPECT_EQ(human_seconds(std::nan("")), "?");
  EXPECT_EQ(human_seconds(INFINITY), "?");
}

TEST(Progress, BarGrowsAndFitsTheTerminal) {
  const auto filled = [](int64_t step) {
    const std::string bar = bar_line(at_step(step), 120);
    return std::count(bar.begin(), bar.end(), '#');
  };
  EXPECT_EQ(filled(0), 0);
  EXPECT_GT(filled(100), filled(10));
  const std::string last = bar_line(at_step(200), 120);
  EXPECT_EQ(last.find('.'), last.find("2.1034") + 1) << "a cell of the finished bar is empty: " << last;
  for (const int width : {1, 20, 40, 80, 120, 400}) {
    for (const int64_t step : {0, 100, 200}) {
      EXPECT_LE(bar_line(at_step(step), width).size(), static_cast<size_t>(std::max(width, 20)));
    }
  }
  EXPECT_NE(bar_line(at_step(40), 120).find("left 1:20"), std::string::npos);
}

TEST(Progress, PlainLinesAreRateLimitedExceptTheFirstAndTheLast) {
  std::ostringstream out;
  Progress progress(out, {.terminal = false, .between = seconds(2)});
  const auto lines = [&] {
    const std::string text = out.str();
    return std::count(text.begin(), text.end(), '\n');
  };
  progress.update(at_step(1), kStart);
  EXPECT_EQ(lines(), 1);
  progress.update(at_step(2), kStart + milliseconds(1999));
  EXPECT_EQ(lines(), 1);
  progress.update(at_step(3), kStart + milliseconds(2000));
  EXPECT_EQ(lines(), 2);
  progress.update(at_step(200), kStart + milliseconds(2001));
  EXPECT_EQ(lines(), 3);
  progress.finish();
  EXPECT_EQ(out.str().find('\x1b'), std::string::npos) << "control characters outside a terminal";
  EXPECT_EQ(out.str().find('\r'), std::string::npos);
}

TEST(Progress, TheBarIsRedrawnInPlaceAndLinesGoAboveIt) {
  std::ostringstream out;
  {
    Progress progress(out, {.terminal = true, .width = 121});
    progress.update(at_step(1), kStart);
    progress.update(at_step(2), kStart + milliseconds(50));  // too soon
    EXPECT_EQ(out.str(), "\r\x1b[K" + bar_line(at_step(1), 120));
    out.str("");
    progress.line("validation loss 1.9");
    EXPECT_EQ(out.str(), "\r\x1b[Kvalidation loss 1.9\n\r\x1b[K" + bar_line(at_step(1), 120));
    out.str("");
    progress.update(at_step(200), kStart + milliseconds(60));
    EXPECT_EQ(out.str(), "\r\x1b[K" + bar_line(at_step(200), 120));
    out.str("");
  }
  EXPECT_EQ(out.str(), "\n") << "the destructor leaves the bar's line, once";
}

TEST(Progress, AFileIsNoTerminal) {
  const int file = open("/dev/null", O_WRONLY);
  ASSERT_GE(file, 0);
  EXPECT_FALSE(is_terminal(file));
  EXPECT_EQ(terminal_width(file), 80);
  close(file);
}

}  // namespace
}  // namespace fsdpp::observe
