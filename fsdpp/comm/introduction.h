#pragma once

#include <span>
#include <string>

#include "fsdpp/comm/process.h"

namespace fsdpp::comm {

/// What a process tells its peers before they share memory.
struct Introduction {
  int rank = 0;
  int ranks = 1;
  HostId host;
  ProcessId process;
  int descriptor = -1;  // of the memory file in which it leaves notes

  friend bool operator==(const Introduction&, const Introduction&) = default;
};

[[nodiscard]] std::string to_text(const Introduction& introduction);
/// The inverse. Throws EnvironmentError quoting `text` when it is none.
[[nodiscard]] Introduction introduction_from(const std::string& text);

/// Throws UsageError naming two ranks and what differs unless all (at least one, in rank order) can share
/// memory and agree on the number of ranks. Every rank that passes the same introductions gets the same
/// error.
void require_one_host(std::span<const Introduction> all);

}  // namespace fsdpp::comm
