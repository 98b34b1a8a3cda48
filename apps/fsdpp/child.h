#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <vector>

namespace fsdpp::app {

/// What rank processes are started with. Built before any of them, so that nothing is allocated between fork
/// and exec.
struct ChildSetting {
  std::vector<std::string> arguments;  // argv, the program's name first
  int ranks = 1;
  int store_port = 0;
  sigset_t signal_mask{};  // of the children
};

/// One rank's process, and the pipe through which its stderr comes.
///
/// Rank 0 has the launcher's stdout; what others print there joins their stderr. Lines come out whole and
/// prefixed
/// "[rank N] ". The process dies with the launcher, also when that is killed.
class Child {
 public:
  /// Starts this program again as `rank`. Throws EnvironmentError when the system has no process or pipe
  /// left.
  Child(const ChildSetting& setting, int rank);
  ~Child();  // kills the process if it still runs, and reaps it
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] bool running() const noexcept { return running_; }
  [[nodiscard]] int status() const noexcept { return status_; }  // as waitpid gives it, once it has ended
  /// It was stopped when it was killed: as by a rank that has given it up.
  [[nodiscard]] bool given_up() const noexcept;
  [[nodiscard]] int pipe() const noexcept { return pipe_; }  // to poll for reading; -1 once it is at its end

  /// Sends `number` if the process runs.
  void signal(int number) const noexcept;
  /// Kills a process that is stopped: it would not hear a signal that it shall end by.
  void kill_if_stopped() const noexcept;
  /// Looks whether the process has ended; true when it has done so since the last call.
  bool reap() noexcept;
  /// Forwards what has come to the launcher's stderr, lines as a whole; what is left of one when `all`.
  void forward(bool all);

 private:
  [[noreturn]] static void run(const char* const* argv, const char* const* envp, const ChildSetting& setting,
                               int output, bool owns_stdout, pid_t launcher) noexcept;

  int rank_;
  pid_t pid_ = -1;
  int pipe_ = -1;
  bool running_ = false;
  bool stopped_ = false;
  int status_ = 0;
  std::string pending_;  // a line that has not come to its end
};

}  // namespace fsdpp::app
