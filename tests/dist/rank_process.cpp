#include "tests/dist/rank_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <stdexcept>
#include <utility>

#include "fsdpp/comm/socket.h"

namespace fsdpp::test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

bool is_launcher_variable(const std::string& assignment) {
  for (const char* prefix : {"RANK=", "WORLD_SIZE=", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI_",
                             "MPI_", "SLURM_", "FSDPP_TEST_"}) {
    if (assignment.rfind(prefix, 0) == 0) return true;
  }
  return false;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> all;
  for (std::string& one : strings) all.push_back(one.data());
  all.push_back(nullptr);
  return all;
}

}  // namespace

RankProcess::RankProcess(const Variables& variables) {
  std::vector<std::string> environment;
  for (char** one = environ; *one != nullptr; ++one) {
    if (!is_launcher_variable(*one)) environment.emplace_back(*one);
  }
  for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
  std::vector<std::string> arguments = {"rank"};
  const std::vector<char*> environment_pointers = pointers(environment);
  const std::vector<char*> argument_pointers = pointers(arguments);
  std::array<int, 2> in{};
  std::array<int, 2> out{};
  if (pipe2(in.data(), O_CLOEXEC) != 0 || pipe2(out.data(), O_CLOEXEC) != 0)
    throw std::runtime_error("pipe2");
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {  // only calls that are safe after fork
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(126);
    dup2(in[0], 0);
    dup2(out[1], 1);
    dup2(out[1], 2);
    execve("/proc/self/exe", argument_pointers.data(), environment_pointers.data());
    _exit(127);
  }
  close(in[0]);
  close(out[1]);
  in_ = in[1];
  out_ = out[0];
}

RankProcess::RankProcess(RankProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      in_(std::exchange(other.in_, -1)),
      out_(std::exchange(other.out_, -1)),
      ended_(other.ended_),
      status_(other.status_),
      output_(std::move(other.output_)) {}

RankProcess::~RankProcess() {
  if (pid_ > 0 && !ended_) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (in_ >= 0) close(in_);
  if (out_ >= 0) close(out_);
}

void RankProcess::send(int signal) const { kill(pid_, signal); }

void RankProcess::say(const std::string& line) const {
  const std::string text = line + "\n";
  if (write(in_, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    throw std::runtime_error("write");
}

bool RankProcess::read_some(milliseconds most) {
  pollfd ready{out_, POLLIN, 0};
  if (poll(&ready, 1, static_cast<int>(most.count())) <= 0) return true;
  std::array<char, 4096> part{};
  const ssize_t count = read(out_, part.data(), part.size());
  if (count > 0) output_.append(part.data(), static_cast<size_t>(count));
  return count > 0;
}

bool RankProcess::printed(const std::string& line) {
  const auto end = Clock::now() + std::chrono::seconds(30);
  while (("\n" + output_).find("\n" + line + "\n") == std::string::npos) {
    if (Clock::now() > end || !read_some(milliseconds(100))) return false;
  }
  return true;
}

int RankProcess::wait(milliseconds limit) {
  const auto end = Clock::now() + limit;
  while (!ended_) {
    const bool open = read_some(milliseconds(2));
    int status = 0;
    if (waitpid(pid_, &status, open ? WNOHANG : 0) == pid_) {
      ended_ = true;
      status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    } else if (Clock::now() > end) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
      ended_ = true;
      status_ = -1000;
    }
  }
  while (read_some(milliseconds(0))) {  // what is left in the pipe
    pollfd ready{out_, POLLIN, 0};
    if (poll(&ready, 1, 0) <= 0 || (ready.revents & POLLIN) == 0) break;
  }
  return status_;
}

std::vector<RankProcess> start_ranks(const std::string& body, int ranks, int port, Variables more,
                                     std::vector<int> only) {
  if (only.empty()) {
    for (int rank = 0; rank < ranks; ++rank) only.push_back(rank);
  }
  std::vector<RankProcess> processes;
  for (const int rank : only) {
    Variables variables = {{"FSDPP_TEST_BODY", body},
                           {"RANK", std::to_string(rank)},
                           {"WORLD_SIZE", std::to_string(ranks)},
                           {"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", std::to_string(port)}};
    for (const auto& [name, value] : more) variables[name] = value;
    processes.emplace_back(variables);
  }
  return processes;
}

int free_port() {
  const int socket = comm::listen_on("127.0.0.1", 0);
  const int port = comm::port_of(socket);
  close(socket);
  return port;
}

}  // namespace fsdpp::test
