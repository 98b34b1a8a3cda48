#include "fsdpp/comm/process.h"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <sstream>

#include "fsdpp/base/error.h"

namespace fsdpp::comm {

std::optional<ProcessState> process_state(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  // "4711 (a name, maybe with ) and spaces) S 1 ...": the state comes after the last parenthesis.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));
  ProcessState state;
  state.id.pid = pid;
  fields >> state.letter;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  if (!(fields >> state.id.started)) return std::nullopt;
  return state;
}

ProcessId own_process() {
  const std::optional<ProcessState> state = process_state(getpid());
  if (!state)
    throw EnvironmentError("cannot read /proc/self/stat: /proc must be mounted for ranks on one host");
  return state->id;
}

std::optional<Trouble> trouble_with_process(const ProcessId& process) {
  const std::string name = "process " + std::to_string(process.pid);
  const std::optional<ProcessState> state = process_state(process.pid);
  if (!state || state->id != process || state->letter == 'Z' || state->letter == 'X') {
    return Trouble{name + " is gone", true};
  }
  if (state->letter == 'T') return Trouble{name + " is stopped", false};
  if (state->letter == 't') return Trouble{name + " is stopped by a debugger", false};
  return std::nullopt;
}

void end_if_stopped(const ProcessId& process) noexcept {
  try {
    const std::optional<ProcessState> state = process_state(process.pid);
    if (state && state->id == process && state->letter == 'T') kill(process.pid, SIGKILL);
  } catch (...) {  // out of memory: then it stays, as it would without us
  }
}

HostId own_host() {
  HostId host;
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) == 0) host.name = name.data();
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::getline(boot, host.boot);
  std::array<char, 128> link{};
  if (readlink("/proc/self/ns/pid", link.data(), link.size() - 1) > 0) host.pid_namespace = link.data();
  return host;
}

}  // namespace fsdpp::comm
