#include "fsdpp/device/cuda_graph.h"

#include <ATen/cuda/CUDAGraph.h>

namespace fsdpp::device {

struct CudaStepGraph::Graph {
  at::cuda::CUDAGraph graph;
};

CudaStepGraph::CudaStepGraph(const std::function<void()>& step) : graph_(std::make_unique<Graph>()) {
  // Relaxed: autograd's thread and the watchdog's call CUDA meanwhile.
  graph_->graph.capture_begin({0, 0}, cudaStreamCaptureModeRelaxed);
  step();
  graph_->graph.capture_end();
}

CudaStepGraph::~CudaStepGraph() = default;

void CudaStepGraph::replay() { graph_->graph.replay(); }

}  // namespace fsdpp::device
