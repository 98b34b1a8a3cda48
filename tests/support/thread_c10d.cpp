#include "tests/support/thread_c10d.h"

#include <ATen/ATen.h>

#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "fsdpp/base/error.h"

namespace fsdpp::test {
namespace {

class Done final : public c10d::Work {
 public:
  explicit Done(std::exception_ptr error) { finish(std::move(error)); }
};
class Aborted final : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override { return false; }
};
class NeverDone final : public c10d::Work {};

}  // namespace

/// Where the ranks of one backend meet. A meeting that failed stays so.
struct ThreadC10d::Meeting {
  explicit Meeting(int ranks) : inputs(static_cast<std::size_t>(ranks)), called(inputs.size()) {}

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<at::Tensor> inputs;   // per rank
  std::vector<std::string> called;  // per rank
  std::size_t arrived = 0;
  uint64_t meetings = 0;

  // Returns when every rank has come.
  void meet(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex);
    const uint64_t own = meetings;
    if (++arrived == inputs.size()) {
      arrived = 0;
      ++meetings;
      changed.notify_all();
      return;
    }
    const bool met = changed.wait_for(lock, timeout, [&] { return meetings != own; });
    if (!met) throw std::runtime_error(text("timed out after ", timeout.count(), " ms"));
  }
};

ThreadC10d::ThreadC10d(std::shared_ptr<Meeting> meeting, int rank, int ranks,
                       std::chrono::milliseconds timeout)
    : Backend(rank, ranks), meeting_(std::move(meeting)), timeout_(timeout) {}

// The first rank's meeting, whose address fits a double.
c10::intrusive_ptr<ThreadC10d> ThreadC10d::over(comm::PeerGroup& group, std::chrono::milliseconds timeout) {
  std::shared_ptr<Meeting> meeting;
  if (group.rank() == 0) meeting = std::make_shared<Meeting>(group.ranks());
  const auto own = static_cast<double>(reinterpret_cast<uintptr_t>(&meeting));
  const auto first = static_cast<uintptr_t>(group.exchange(std::vector<double>{own}).front());
  if (group.rank() != 0) meeting = *reinterpret_cast<const std::shared_ptr<Meeting>*>(first);
  group.barrier();
  return c10::make_intrusive<ThreadC10d>(std::move(meeting), group.rank(), group.ranks(), timeout);
}

template <class Move>
c10::intrusive_ptr<c10d::Work> ThreadC10d::run(const std::string& what, const at::Tensor& output,
                                               const at::Tensor& input, const Move& move) {
  const auto* in = static_cast<const std::byte*>(input.const_data_ptr());
  const auto* out = static_cast<const std::byte*>(output.const_data_ptr());
  TORCH_CHECK(out + output.nbytes() <= in || in + input.nbytes() <= out, what, ": the buffers overlap");
  TORCH_CHECK(output.is_contiguous() && input.is_contiguous(), what, ": a buffer is not contiguous");
  switch (failure_) {
    case Failure::none:
      break;
    case Failure::throws:
      TORCH_CHECK(false, "the cable is cut");
    case Failure::in_work:
      return c10::make_intrusive<Done>(std::make_exception_ptr(std::runtime_error("the link is down")));
    case Failure::aborted:
      return c10::make_intrusive<Aborted>();
    case Failure::never_done:
      return c10::make_intrusive<NeverDone>();
  }
  try {
    const auto rank = static_cast<std::size_t>(getRank());
    meeting_->inputs[rank] = input;
    meeting_->called[rank] = text(what, " of ", input.numel(), " ", input.dtype().name());
    meeting_->meet(timeout_);
    for (const std::string& called : meeting_->called)
      TORCH_CHECK(called == meeting_->called[rank], "ranks call ", called, " and ", meeting_->called[rank]);
    move();
    meeting_->meet(timeout_);  // every rank has read
    return c10::make_intrusive<Done>(nullptr);
  } catch (...) {
    return c10::make_intrusive<Done>(std::current_exception());
  }
}

c10::intrusive_ptr<c10d::Work> ThreadC10d::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                           const c10d::AllgatherOptions& /*options*/) {
  ++calls_.gathers;
  return run("allgather", output, input, [&] {
    std::vector<at::Tensor> pieces = output.chunk(getSize());
    for (std::size_t rank = 0; rank < pieces.size(); ++rank) pieces[rank].copy_(meeting_->inputs[rank]);
  });
}

c10::intrusive_ptr<c10d::Work> ThreadC10d::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "reduce_scatter: there are sums alone");
  ++calls_.reduces;
  return run("reduce_scatter", output, input, [&] {
    const auto own = static_cast<std::size_t>(getRank());
    output.copy_(meeting_->inputs[0].chunk(getSize())[own]);
    for (std::size_t rank = 1; rank < meeting_->inputs.size(); ++rank)
      output.add_(meeting_->inputs[rank].chunk(getSize())[own]);
  });
}

}  // namespace fsdpp::test
