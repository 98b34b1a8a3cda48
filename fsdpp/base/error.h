#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace fsdpp {

/// The caller's mistake: the message names the value, what was expected and the remedy.
class UsageError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// The environment failed (a peer is lost, memory or disk is short). `retryable()` says whether the same call
/// may work on a second try without a change of the environment.
class EnvironmentError : public std::runtime_error {
 public:
  explicit EnvironmentError(const std::string& message, bool retryable = false)
      : std::runtime_error(message), retryable_(retryable) {}
  [[nodiscard]] bool retryable() const noexcept { return retryable_; }

 private:
  bool retryable_;
};

/// There is not as much memory as was asked for.
class NoRoomError : public EnvironmentError {
 public:
  using EnvironmentError::EnvironmentError;
};

/// A peer did not do in time what this rank waits for, or its process is gone.
class PeerError : public EnvironmentError {
 public:
  PeerError(const std::string& message, int rank, std::string group, uint64_t sequence)
      : EnvironmentError(message), rank_(rank), group_(std::move(group)), sequence_(sequence) {}
  [[nodiscard]] int rank() const noexcept { return rank_; }                   // the missing rank
  [[nodiscard]] const std::string& group() const noexcept { return group_; }  // the group's name
  [[nodiscard]] uint64_t sequence() const noexcept { return sequence_; }      // the number waited for

 private:
  int rank_;
  std::string group_;
  uint64_t sequence_;
};

/// The user asked the program to stop (Ctrl-C) while this rank waited.
class Interrupted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Joins its arguments as text: text("rank ", 3) == "rank 3".
template <class... Parts>
[[nodiscard]] std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

/// Throws UsageError with the joined `message` unless `condition` holds.
template <class... Parts>
void require(bool condition, const Parts&... message) {
  if (!condition) throw UsageError(text(message...));
}

/// Prints the message and aborts: for invariants of ours, never for the caller's mistakes.
[[noreturn]] void broken_invariant(std::string_view expression, std::string_view file, int line,
                                   const std::string& message);

}  // namespace fsdpp

/// An always-on check of our own invariants.
#define FSDPP_INVARIANT(condition, ...)                                                                      \
  do {                                                                                                       \
    if (!(condition)) ::fsdpp::broken_invariant(#condition, __FILE__, __LINE__, ::fsdpp::text(__VA_ARGS__)); \
  } while (false)
