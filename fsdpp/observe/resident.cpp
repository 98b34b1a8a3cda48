#include "fsdpp/observe/resident.h"

#include <charconv>
#include <fstream>
#include <iterator>
#include <string>

namespace fsdpp::observe {
namespace {

std::string contents(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

int64_t kilobytes_line(std::string_view text, std::string_view name) {
  while (!text.empty()) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (!line.starts_with(name) || line.size() <= name.size() || line[name.size()] != ':') continue;
    line.remove_prefix(name.size() + 1);
    const size_t digit = line.find_first_of("0123456789");
    if (digit == std::string_view::npos) return 0;
    int64_t value = 0;
    std::from_chars(line.data() + digit, line.data() + line.size(), value);
    return value * 1024;
  }
  return 0;
}

Resident resident() {
  const std::string status = contents("/proc/self/status");
  return {.now = kilobytes_line(status, "VmRSS"),
          .peak = kilobytes_line(status, "VmHWM"),
          .own = kilobytes_line(status, "RssAnon") + kilobytes_line(status, "RssShmem"),
          .proportional = kilobytes_line(contents("/proc/self/smaps_rollup"), "Pss")};
}

}  // namespace fsdpp::observe
