#include "fsdpp/observe/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <ostream>

#include "fsdpp/base/bytes.h"

namespace fsdpp::observe {
namespace {

constexpr int kMinimumWidth = 20;
constexpr int kBarWidth = 24;  // of the bar itself, where the figures leave that much
constexpr std::string_view kClearLine = "\r\x1b[K";

__attribute__((format(printf, 1, 2))) std::string format(const char* pattern, ...) {
  std::array<char, 128> out{};
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(out.data(), out.size(), pattern, arguments);
  va_end(arguments);
  return out.data();
}

std::string rate(double tokens_per_s) {
  if (tokens_per_s >= 1e6) return format("%.2fM tokens/s", tokens_per_s / 1e6);
  if (tokens_per_s >= 1e4) return format("%.1fk tokens/s", tokens_per_s / 1e3);
  return format("%.0f tokens/s", tokens_per_s);
}

std::string figures_text(const StepFigures& f) {
  return format("loss %.4f  norm %.3g  lr %.2e  ", f.loss, f.gradient_norm, f.learning_rate) +
         rate(f.tokens_per_s) + "  " + human_bytes(f.memory_bytes) + "  left " +
         human_seconds(f.seconds_left);
}

}  // namespace

std::string human_seconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  const auto whole = static_cast<long long>(std::llround(seconds));
  if (whole < 60) return format("%lld s", whole);
  if (whole < 3600) return format("%lld:%02lld", whole / 60, whole % 60);
  return format("%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
}

std::string plain_line(const StepFigures& f) {
  return format("step %lld/%lld  ", static_cast<long long>(f.step), static_cast<long long>(f.steps)) +
         figures_text(f);
}

std::string bar_line(const StepFigures& f, int width) {
  width = std::max(width, kMinimumWidth);
  const double done =
      f.steps > 0 ? std::clamp(static_cast<double>(f.step) / static_cast<double>(f.steps), 0.0, 1.0) : 0.0;
  const std::string counts =
      format(" %lld/%lld", static_cast<long long>(f.step), static_cast<long long>(f.steps));
  const std::string figures = figures_text(f);
  const int room = width - static_cast<int>(counts.size() + 2 + figures.size()) - 2;  // 2 brackets, 2 spaces
  const int cells = std::clamp(room, 8, kBarWidth);
  const int full = static_cast<int>(std::floor(done * cells));
  std::string bar = "[" + std::string(static_cast<size_t>(full), '#') +
                    std::string(static_cast<size_t>(cells - full), '.') + "]" + counts + "  " + figures;
  if (bar.size() > static_cast<size_t>(width)) bar.resize(static_cast<size_t>(width));
  return bar;
}

bool is_terminal(int descriptor) {
  const char* kind = std::getenv("TERM");
  return isatty(descriptor) == 1 && !(kind != nullptr && std::string_view(kind) == "dumb");
}

int terminal_width(int descriptor) {
  winsize size{};
  if (ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

Progress::Progress(std::ostream& out, Options options) : out_(out), options_(options) {}

Progress::~Progress() { finish(); }

void Progress::update(const StepFigures& figures, Clock::time_point now) {
  const auto pause = options_.terminal ? options_.redraw : options_.between;
  if (shown_ && figures.step < figures.steps && now - *shown_ < pause) return;
  shown_ = now;
  if (options_.terminal) {
    draw(bar_line(figures, options_.width - 1));  // the last column would make some terminals wrap
  } else {
    out_ << plain_line(figures) << '\n' << std::flush;
  }
}

void Progress::line(std::string_view text) {
  if (!bar_.empty()) out_ << kClearLine;
  out_ << text << '\n';
  if (!bar_.empty()) draw(bar_);
  out_ << std::flush;
}

void Progress::finish() {
  if (!bar_.empty()) out_ << '\n' << std::flush;
  bar_.clear();
}

void Progress::draw(const std::string& bar) {
  bar_ = bar;
  out_ << kClearLine << bar_ << std::flush;
}

}  // namespace fsdpp::observe
