#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <memory>
#include <string>

#include "fsdpp/comm/peer_group.h"

namespace fsdpp::test {

/// A c10d backend whose ranks are threads of one process: what a caller's own process group is to us.
///
/// Strict: no averages (as gloo), no output that overlaps its input (MPI forbids it), and ranks that call
/// different things are told so. Sums in rank order. Failures come as c10d's do, in the Work.
class ThreadC10d final : public c10d::Backend {
 public:
  /// Collective over `group`. Waits for other ranks no longer than `timeout`.
  [[nodiscard]] static c10::intrusive_ptr<ThreadC10d> over(
      comm::PeerGroup& group, std::chrono::milliseconds timeout = std::chrono::milliseconds(20000));

  struct Calls {
    int gathers = 0;
    int reduces = 0;
    friend bool operator==(const Calls&, const Calls&) = default;
  };
  /// Of this rank so far.
  [[nodiscard]] Calls calls() const { return calls_; }

  enum class Failure { none, throws, in_work, aborted, never_done };
  /// How this rank's later calls fail, without a word to the others.
  void fail(Failure how) { failure_ = how; }

  const std::string getBackendName() const override { return "threads"; }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override;

  struct Meeting;
  ThreadC10d(std::shared_ptr<Meeting> meeting, int rank, int ranks, std::chrono::milliseconds timeout);

 private:
  template <class Move>
  c10::intrusive_ptr<c10d::Work> run(const std::string& what, const at::Tensor& output,
                                     const at::Tensor& input, const Move& move);

  std::shared_ptr<Meeting> meeting_;
  std::chrono::milliseconds timeout_;
  Calls calls_;
  Failure failure_ = Failure::none;
};

}  // namespace fsdpp::test
