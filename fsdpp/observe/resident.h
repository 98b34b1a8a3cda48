#pragma once

#include <cstdint>
#include <string_view>

namespace fsdpp::observe {

/// Memory of this process as the system counts it, in bytes; 0 where the system does not say.
struct Resident {
  int64_t now = 0;           // VmRSS: shared pages count in full
  int64_t peak = 0;          // VmHWM
  int64_t own = 0;           // RssAnon + RssShmem: without files, which the system can read again
  int64_t proportional = 0;  // Pss: a page shared by n processes counts 1/n
};

/// Reads /proc/self/status and /proc/self/smaps_rollup.
[[nodiscard]] Resident resident();

/// Bytes of the line "NAME:   123 kB" in the text of such a file; 0 when there is none.
[[nodiscard]] int64_t kilobytes_line(std::string_view text, std::string_view name);

}  // namespace fsdpp::observe
