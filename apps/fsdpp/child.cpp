#include "apps/fsdpp/child.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "fsdpp/base/error.h"

namespace fsdpp::app {
namespace {

constexpr size_t kLongestLine = size_t{64} << 10;  // a longer one is cut rather than kept

/// The environment with `ours` in place of variables of the same name.
std::vector<std::string> environment_with(const std::vector<std::string>& ours) {
  std::vector<std::string> out;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view entry(*variable);
    const std::string_view name = entry.substr(0, entry.find('=') + 1);
    bool replaced = false;
    for (const auto& own : ours) replaced = replaced || std::string_view(own).starts_with(name);
    if (!replaced) out.emplace_back(entry);
  }
  out.insert(out.end(), ours.begin(), ours.end());
  return out;
}

std::vector<std::string> rank_environment(const ChildSetting& setting, int rank) {
  std::vector<std::string> ours = {
      text("RANK=", rank),
      text("LOCAL_RANK=", rank),
      text("WORLD_SIZE=", setting.ranks),
      text("LOCAL_WORLD_SIZE=", setting.ranks),
      "MASTER_ADDR=127.0.0.1",
      text("MASTER_PORT=", setting.store_port),
      "TORCHELASTIC_USE_AGENT_STORE=True",
  };
  // Ranks share the machine's cores; one thread each unless the user says otherwise.
  if (std::getenv("OMP_NUM_THREADS") == nullptr) ours.emplace_back("OMP_NUM_THREADS=1");
  return environment_with(ours);
}

std::vector<const char*> pointers(const std::vector<std::string>& strings) {
  std::vector<const char*> out;
  for (const auto& string : strings) out.push_back(string.c_str());
  out.push_back(nullptr);
  return out;
}

void write_all(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = write(STDERR_FILENO, bytes.data(), bytes.size());
    if (count < 0 && errno != EINTR) return;  // nobody listens any more
    if (count > 0) bytes.remove_prefix(static_cast<size_t>(count));
  }
}

}  // namespace

Child::Child(const ChildSetting& setting, int rank) : rank_(rank) {
  const auto environment = rank_environment(setting, rank);
  const auto envp = pointers(environment);
  const auto argv = pointers(setting.arguments);
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw EnvironmentError(text("cannot make a pipe for rank ", rank, ": ", std::strerror(errno),
                                "; raise the limit of open files (ulimit -n)"));
  }
  pipe_ = ends[0];
  fcntl(pipe_, F_SETFL, O_NONBLOCK);
  const pid_t launcher = getpid();
  pid_ = fork();
  if (pid_ == 0) run(argv.data(), envp.data(), setting, ends[1], rank == 0, launcher);
  const int error = errno;
  close(ends[1]);
  if (pid_ < 0) {
    close(pipe_);
    throw EnvironmentError(text("cannot start rank ", rank, ": ", std::strerror(error),
                                "; start fewer with --ranks or raise the limit of processes (ulimit -u)"));
  }
  running_ = true;
}

Child::~Child() {
  signal(SIGKILL);
  if (running_) waitpid(pid_, &status_, 0);
  if (pipe_ >= 0) close(pipe_);
}

/// In the child, between fork and exec: only calls that are safe there (the launcher's store has threads).
void Child::run(const char* const* argv, const char* const* envp, const ChildSetting& setting, int output,
                bool owns_stdout, pid_t launcher) noexcept {
  // A group of its own: a Ctrl-C meets the launcher alone, which passes it on once.
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(EXIT_FAILURE);  // it died before the line above
  const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (nothing >= 0) dup2(nothing, STDIN_FILENO);
  dup2(output, STDERR_FILENO);
  if (!owns_stdout) dup2(output, STDOUT_FILENO);
  sigprocmask(SIG_SETMASK, &setting.signal_mask, nullptr);
  execve("/proc/self/exe", const_cast<char* const*>(argv), const_cast<char* const*>(envp));
  constexpr std::string_view kMessage = "fsdpp: cannot start itself again through /proc/self/exe\n";
  if (write(STDERR_FILENO, kMessage.data(), kMessage.size()) < 0) _exit(126);
  _exit(127);
}

void Child::signal(int number) const noexcept {
  if (running_) kill(pid_, number);
}

void Child::kill_if_stopped() const noexcept {
  siginfo_t info{};
  const auto id = static_cast<id_t>(pid_);
  const bool stopped = stopped_ || (running_ && waitid(P_PID, id, &info, WSTOPPED | WNOHANG | WNOWAIT) == 0 &&
                                    info.si_pid == pid_);
  if (stopped) signal(SIGKILL);
}

bool Child::reap() noexcept {
  while (running_ && waitpid(pid_, &status_, WNOHANG | WUNTRACED | WCONTINUED) == pid_) {
    if (WIFEXITED(status_) || WIFSIGNALED(status_)) {
      running_ = false;
      return true;
    }
    stopped_ = WIFSTOPPED(status_);
  }
  return false;
}

bool Child::given_up() const noexcept {
  return !running_ && stopped_ && WIFSIGNALED(status_) && WTERMSIG(status_) == SIGKILL;
}

void Child::forward(bool all) {
  std::array<char, 16384> bytes{};
  ssize_t count = 0;
  while (pipe_ >= 0 && (count = read(pipe_, bytes.data(), bytes.size())) > 0) {
    pending_.append(bytes.data(), static_cast<size_t>(count));
  }
  if (pipe_ >= 0 && count == 0) {
    close(pipe_);
    pipe_ = -1;
    all = true;
  }
  // On a terminal rank 0's progress bar may stand on the line: it is drawn again with the next step.
  static const std::string prefix_start = isatty(STDERR_FILENO) == 1 ? "\r\x1b[K" : "";
  const std::string prefix = text(prefix_start, "[rank ", rank_, "] ");
  std::string out;
  size_t begin = 0;
  for (size_t end = 0; (end = pending_.find('\n', begin)) != std::string::npos; begin = end + 1) {
    out += prefix + pending_.substr(begin, end + 1 - begin);
  }
  pending_.erase(0, begin);
  if (!pending_.empty() && (all || pending_.size() > kLongestLine)) {
    out += prefix + pending_ + "\n";
    pending_.clear();
  }
  write_all(out);
}

}  // namespace fsdpp::app
