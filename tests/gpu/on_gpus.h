#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <iostream>
#include <string>
#include <vector>

#include "fsdpp/comm/peer_group.h"
#include "fsdpp/runtime/sharded_model.h"

namespace fsdpp::test {

/// On this rank's GPU.
inline at::TensorOptions on(comm::PeerGroup& group, at::ScalarType dtype) {
  return at::TensorOptions(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(group.lanes().gpu())))
      .dtype(dtype);
}

/// Whether the gradients of what is trained are `oracle`'s, which is on the CPU; prints which are not.
inline bool same(runtime::ShardedModel& model, const torch::nn::Module& oracle, const std::string& what) {
  bool right = true;
  const std::vector<at::Tensor> gradients = model.full_gradients();
  const auto names = model.parameters();
  const auto expected = oracle.named_parameters();
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (!expected[names[i].first].requires_grad()) continue;
    const at::Tensor its = expected[names[i].first].grad();
    if (gradients[i].defined() && gradients[i].cpu().to(at::kFloat).equal(its)) continue;
    std::cerr << what << ": gradient of " << names[i].first << " is wrong\n";
    right = false;
  }
  return right;
}

}  // namespace fsdpp::test
