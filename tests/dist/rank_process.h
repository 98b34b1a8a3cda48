#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace fsdpp::test {

using Variables = std::map<std::string, std::string>;

/// This test program started again as one rank of a job: its main() runs the body that $FSDPP_TEST_BODY
/// names. Killed and reaped when destroyed. What it prints is kept.
class RankProcess {
 public:
  /// The environment is this one's without any launcher's variables, plus `variables`.
  explicit RankProcess(const Variables& variables);
  ~RankProcess();
  RankProcess(RankProcess&& other) noexcept;
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;
  RankProcess& operator=(RankProcess&&) = delete;

  [[nodiscard]] pid_t pid() const { return pid_; }
  void send(int signal) const;
  void say(const std::string& line) const;  // to its standard input

  /// Waits until it has printed `line` (standard output or error): a gate. False after 30 s or at its end.
  [[nodiscard]] bool printed(const std::string& line);
  /// Waits for its end: exit status, or minus the signal's number. Kills it after `limit` and gives -1000.
  int wait(std::chrono::milliseconds limit);
  [[nodiscard]] const std::string& output() const { return output_; }

 private:
  bool read_some(std::chrono::milliseconds most);

  pid_t pid_ = -1;
  int in_ = -1;
  int out_ = -1;
  bool ended_ = false;
  int status_ = 0;
  std::string output_;
};

/// One process per rank with torchrun's variables: all of the job, or `only` the ranks given.
[[nodiscard]] std::vector<RankProcess> start_ranks(const std::string& body, int ranks, int port,
                                                   Variables more = {}, std::vector<int> only = {});

/// A port of 127.0.0.1 that was free just now.
[[nodiscard]] int free_port();

}  // namespace fsdpp::test
