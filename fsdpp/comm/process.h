#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "fsdpp/comm/backend.h"

namespace fsdpp::comm {

/// A process of this host, told from a later one that got the same number by the time it started.
struct ProcessId {
  pid_t pid = 0;
  uint64_t started = 0;  // clock ticks after boot: field 22 of /proc/PID/stat

  friend bool operator==(const ProcessId&, const ProcessId&) = default;
};

/// A process as /proc shows it now.
struct ProcessState {
  ProcessId id;
  char letter = '?';  // R, S, D, T (stopped), t (stopped by a debugger), Z (ended, not yet reaped), ...
};

/// Nothing when no such process exists. Never throws.
[[nodiscard]] std::optional<ProcessState> process_state(pid_t pid);

/// This process. Throws EnvironmentError when /proc is not mounted.
[[nodiscard]] ProcessId own_process();

/// Why `process` does not answer: it is gone (final) or stopped; nothing when it seems alive.
[[nodiscard]] std::optional<Trouble> trouble_with_process(const ProcessId& process);

/// Ends `process` with SIGKILL if it is stopped (state T, not by a debugger); leaves a running one alone.
void end_if_stopped(const ProcessId& process) noexcept;

/// What must be equal for two processes to open each other's memory: host, boot and process numbering.
struct HostId {
  std::string name;           // hostname
  std::string boot;           // /proc/sys/kernel/random/boot_id: another host may have the same name
  std::string pid_namespace;  // /proc/self/ns/pid: containers of one host number their processes apart

  /// Names count only where the boot is unknown: one host may have several.
  friend bool operator==(const HostId& a, const HostId& b) {
    return a.boot == b.boot && a.pid_namespace == b.pid_namespace && (!a.boot.empty() || a.name == b.name);
  }
};

[[nodiscard]] HostId own_host();

}  // namespace fsdpp::comm
