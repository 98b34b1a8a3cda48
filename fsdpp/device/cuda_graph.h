#pragma once

#include <functional>
#include <memory>

namespace fsdpp::device {

/// The device work of one step, captured once and launched as a whole: the host's part of a step is one call.
///
/// Every rank captures the same step. Before it, run a few steps as usual, so that plans, tables and kernels
/// are there; the last of them ends with an optimizer's step (or another publication), so that the captured
/// one gathers. Inputs are read from the memory that the captured step read. Between replays nothing of the
/// model may run but what reads results. Its waits are watched as those of eager steps are.
class CudaStepGraph {
 public:
  /// Runs `step` once, enqueueing nothing, on the stream that is current, which must not be the default one
  /// (use_compute_stream()). Throws c10::Error when something in it cannot be captured.
  explicit CudaStepGraph(const std::function<void()>& step);
  ~CudaStepGraph();
  CudaStepGraph(const CudaStepGraph&) = delete;
  CudaStepGraph& operator=(const CudaStepGraph&) = delete;

  /// Enqueues the step on the current stream.
  void replay();

 private:
  void end_quietly() noexcept;

  struct Graph;
  std::unique_ptr<Graph> graph_;
};

}  // namespace fsdpp::device
