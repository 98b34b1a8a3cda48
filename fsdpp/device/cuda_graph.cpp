#include "fsdpp/device/cuda_graph.h"

#include <ATen/cuda/CUDAGraph.h>

#include <exception>

namespace fsdpp::device {

struct CudaStepGraph::Graph {
  at::cuda::CUDAGraph graph;
};

CudaStepGraph::CudaStepGraph(const std::function<void()>& step) : graph_(std::make_unique<Graph>()) {
  // Relaxed: autograd's thread calls CUDA meanwhile.
  graph_->graph.capture_begin({0, 0}, cudaStreamCaptureModeRelaxed);
  try {
    step();
  } catch (...) {
    end_quietly();
    throw;
  }
  graph_->graph.capture_end();
}

// While the stream captures, nothing that the unwinding gives back could be given back.
void CudaStepGraph::end_quietly() noexcept {
  try {
    graph_->graph.capture_end();
  } catch (const std::exception&) {  // the capture is invalid by now: the first error is the one to report
  }
}

CudaStepGraph::~CudaStepGraph() = default;

void CudaStepGraph::replay() { graph_->graph.replay(); }

}  // namespace fsdpp::device
