#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fsdpp::comm {

/// How much more memory a process may take, and what says so.
struct AvailableMemory {
  uint64_t bytes = UINT64_MAX;  // UINT64_MAX: nothing known to limit it
  std::string limit;  // "MemAvailable of /proc/meminfo", "cgroup limit /sys/fs/cgroup/job/memory.max"
};

/// The least of /proc/meminfo's MemAvailable and what the limits of this process's cgroups (v1 and v2, with
/// every cgroup above) leave; page cache that the kernel can drop counts as free. `root`: where /proc and
/// /sys are, for tests. Never throws for a missing or strange file: that limit is then unknown.
[[nodiscard]] AvailableMemory available_memory(const std::string& root = "");

/// Throws EnvironmentError unless `ranks` allocations of `bytes` fit: the message names what they are for,
/// the needed and the available bytes, and the remedy.
void check_memory(std::size_t bytes, int ranks, const std::string& purpose, const AvailableMemory& available);

/// `bytes` rounded up to whole pages. Throws UsageError when 0 or so large that the sum overflows.
[[nodiscard]] std::size_t whole_pages(std::size_t bytes);

}  // namespace fsdpp::comm
