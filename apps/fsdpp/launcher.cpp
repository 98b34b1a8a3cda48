#include "apps/fsdpp/launcher.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>

#include "apps/fsdpp/child.h"
#include "apps/fsdpp/exit_code.h"
#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "fsdpp/comm/rendezvous.h"

namespace fsdpp::app {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kGraceAfterFailure{2000};
constexpr milliseconds kGraceAfterSignal{1200};     // so that all is over in two seconds
constexpr milliseconds kGraceAfterGivingUp{10000};  // of the rank that gave another up: CUDA ends slowly
constexpr std::array kSignals = {SIGCHLD, SIGINT, SIGTERM, SIGTSTP};

std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return name != nullptr ? text("SIG", name) : text("signal ", number);
}

void say(const std::string& message) { std::fprintf(stderr, "fsdpp: %s\n", message.c_str()); }

/// Signals as something to poll for; blocked as long as it lives.
class SignalQueue {
 public:
  SignalQueue() {
    sigset_t ours;
    sigemptyset(&ours);
    for (const int number : kSignals) sigaddset(&ours, number);
    sigprocmask(SIG_BLOCK, &ours, &before_);
    descriptor_ = signalfd(-1, &ours, SFD_CLOEXEC | SFD_NONBLOCK);
    if (descriptor_ < 0) throw EnvironmentError(text("cannot listen to signals: ", std::strerror(errno)));
  }
  ~SignalQueue() {
    close(descriptor_);
    sigprocmask(SIG_SETMASK, &before_, nullptr);
  }
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }
  [[nodiscard]] const sigset_t& before() const noexcept { return before_; }  // the mask to give to children
  /// The next signal, 0 when there is none.
  [[nodiscard]] int next() const {
    signalfd_siginfo info{};
    return read(descriptor_, &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
  }

 private:
  sigset_t before_{};
  int descriptor_ = -1;
};

class Launcher {
 public:
  Launcher(int ranks, std::vector<std::string> arguments) {
    const ChildSetting setting{.arguments = std::move(arguments),
                               .ranks = ranks,
                               .store_port = store_.port(),
                               .signal_mask = signals_.before()};
    for (int rank = 0; rank < ranks; ++rank) children_.push_back(std::make_unique<Child>(setting, rank));
  }

  int run() {
    if (interrupted()) handle(interrupt_signal());  // it came before the signals were ours
    while (running()) {
      wait();
      for (const auto& child : children_) child->forward(false);
      while (const int number = signals_.next()) handle(number);
      reap();
      if (deadline_ && Clock::now() >= *deadline_) signal_all(SIGKILL);
    }
    for (const auto& child : children_) child->forward(true);
    if (interrupt_ != 0) say(text("stopped by ", signal_name(interrupt_)));
    return interrupt_ != 0 ? kSignalBase + interrupt_ : code_;
  }

 private:
  [[nodiscard]] bool running() const {
    return std::any_of(children_.begin(), children_.end(),
                       [](const auto& child) { return child->running(); });
  }

  void signal_all(int number) const {
    for (const auto& child : children_) child->signal(number);
  }

  /// Asks all to end, and kills those that have not after `grace`. All are asked before a stopped one is
  /// killed: its peers, who wait for it, are to know why it is gone.
  void stop_all(int number, milliseconds grace) {
    signal_all(number);
    for (const auto& child : children_) child->kill_if_stopped();
    deadline_ = Clock::now() + grace;
  }

  /// Until a signal comes, a rank prints something, or the others' time is up.
  void wait() const {
    std::vector<pollfd> sources = {{signals_.descriptor(), POLLIN, 0}};
    for (const auto& child : children_) sources.push_back({child->pipe(), POLLIN, 0});  // poll passes over -1
    int timeout = -1;
    if (deadline_) {
      const auto left = std::chrono::ceil<milliseconds>(*deadline_ - Clock::now()).count();
      timeout =
          static_cast<int>(std::max<int64_t>(left, 20));  // once it has passed: until the killed are gone
    }
    poll(sources.data(), sources.size(), timeout);
  }

  void handle(int number) {
    if (number == SIGTSTP) {  // Ctrl-Z: the ranks rest with us and go on with us
      signal_all(SIGSTOP);
      raise(SIGSTOP);
      signal_all(SIGCONT);
    } else if (number != SIGCHLD) {
      stop_all(interrupt_ == 0 ? number : SIGKILL, kGraceAfterSignal);  // a second one does not wait
      interrupt_ = interrupt_ == 0 ? number : interrupt_;
    }
  }

  void reap() {
    for (const auto& child : children_) {
      if (child->reap() && child->status() != 0) failed_.push_back(child.get());
    }
    if (failed_.empty() || code_ != 0 || interrupt_ != 0) return;
    // Of those found together, one that only lost a peer is the consequence of another, but the cause where
    // that one was stopped and given up. Then it has just said so, and may need a while to end.
    const auto gave_up = std::find_if(failed_.begin(), failed_.end(), lost_a_peer);
    const auto cause = std::find_if(failed_.begin(), failed_.end(), [](const Child* child) {
      return !lost_a_peer(child) && !child->given_up();
    });
    if (cause != failed_.end()) return blame(**cause);
    if (gave_up != failed_.end()) return blame(**gave_up);
    if (!running()) return blame(*failed_.front());
    if (!deadline_) deadline_ = Clock::now() + kGraceAfterGivingUp;
  }

  static bool lost_a_peer(const Child* child) {
    return WIFEXITED(child->status()) && WEXITSTATUS(child->status()) == kLostPeer;
  }

  void blame(const Child& child) {
    const int status = child.status();
    const bool signalled = WIFSIGNALED(status);
    code_ = signalled ? kSignalBase + WTERMSIG(status) : WEXITSTATUS(status);
    say(text("rank ", child.rank(), " failed first, ",
             signalled ? text("ended by signal ", WTERMSIG(status), " (", signal_name(WTERMSIG(status)), ")")
                       : text("with exit code ", code_),
             running() ? "; stopping the other ranks" : ""));
    stop_all(SIGTERM, kGraceAfterFailure);
  }

  SignalQueue signals_;  // before the store, whose threads must not take the signals
  comm::StoreServer store_;
  std::vector<std::unique_ptr<Child>> children_;
  std::vector<const Child*> failed_;  // in the order in which they were found
  int code_ = 0;
  int interrupt_ = 0;
  std::optional<Clock::time_point> deadline_;
};

}  // namespace

int launch(int ranks, std::vector<std::string> arguments) {
  return Launcher(ranks, std::move(arguments)).run();
}

}  // namespace fsdpp::app
