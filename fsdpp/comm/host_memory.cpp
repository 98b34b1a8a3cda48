#include "fsdpp/comm/host_memory.h"

#include <unistd.h>

#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"

namespace fsdpp::comm {
namespace {

// The number in a file of one number; nothing when there is none ("max": no limit).
std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// The number after `key` in a file of "key number" lines.
std::optional<uint64_t> number_after(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    uint64_t value = 0;
    if (words >> word && word == key && words >> value) return value;
  }
  return std::nullopt;
}

struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* droppable;  // the line of memory.stat that counts page cache the kernel gives up first
};
constexpr CgroupFiles kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr CgroupFiles kVersion2 = {"memory.max", "memory.current", "inactive_file"};

void lower(AvailableMemory& available, uint64_t bytes, const std::string& limit) {
  if (bytes < available.bytes) available = {bytes, limit};
}

// A cgroup and every one above it limit a process. Inside a container the path may be the host's, of which
// only the mount's own folder is visible: the walk ends there.
void lower_by_cgroups(AvailableMemory& available, const std::string& root, const std::string& mount,
                      std::string path, const CgroupFiles& files) {
  while (true) {
    if (path == "/") path.clear();
    const std::string folder = mount + path + "/";
    const std::optional<uint64_t> limit = number_in(root + folder + files.limit);
    const std::optional<uint64_t> usage = number_in(root + folder + files.usage);
    if (limit && usage) {
      const uint64_t droppable = number_after(root + folder + "memory.stat", files.droppable).value_or(0);
      const uint64_t used = *usage - std::min(*usage, droppable);
      lower(available, *limit - std::min(*limit, used), "the cgroup limit " + folder + files.limit);
    }
    if (path.empty()) return;
    path.resize(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
  }
}

}  // namespace

AvailableMemory available_memory(const std::string& root) {
  AvailableMemory available;
  if (const auto kib = number_after(root + "/proc/meminfo", "MemAvailable:")) {
    lower(available, *kib * 1024, "MemAvailable of /proc/meminfo");
  }
  std::ifstream cgroups(root + "/proc/self/cgroup");  // lines "4:memory:/path" (v1) and "0::/path" (v2)
  for (std::string line; std::getline(cgroups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers.find(",memory,") != std::string::npos) {
      lower_by_cgroups(available, root, "/sys/fs/cgroup/memory", path, kVersion1);
    } else if (controllers == ",,") {
      lower_by_cgroups(available, root, "/sys/fs/cgroup", path, kVersion2);
    }
  }
  return available;
}

void check_memory(std::size_t bytes, int ranks, const std::string& purpose,
                  const AvailableMemory& available) {
  const auto count = static_cast<std::size_t>(ranks);
  if (bytes <= available.bytes / count) return;
  const auto in_words = [](uint64_t value) { return human_bytes(static_cast<int64_t>(value)); };
  throw EnvironmentError(
      text("not enough memory for ", purpose, ": ", ranks,
           ranks == 1 ? " rank needs " : " ranks of this host need ", bytes, " bytes (", in_words(bytes), ")",
           ranks == 1 ? "" : " each", ", available are ", available.bytes, " bytes (",
           in_words(available.bytes), ", ", available.limit,
           ") in all; use a smaller model or batch, fewer ranks on this host, or raise the limit"));
}

std::size_t whole_pages(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  require(bytes > 0, "an allocation of 0 bytes was asked for, expected at least 1");
  require(bytes <= SIZE_MAX / 2 - page, "an allocation of ", bytes,
          " bytes was asked for: more than can be addressed");
  return (bytes + page - 1) / page * page;
}

}  // namespace fsdpp::comm
