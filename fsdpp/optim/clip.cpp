#include "fsdpp/optim/clip.h"

#include <ATen/ops/linalg_vector_norm.h>

#include <cmath>
#include <limits>
#include <vector>

#include "fsdpp/base/error.h"

namespace fsdpp::optim {
namespace {

// This rank's part of the norm: the largest absolute value, or the sum of powers. NaN wins over everything.
double local_part(const std::vector<at::Tensor>& gradients, double norm_type) {
  double part = 0;
  for (const at::Tensor& gradient : gradients) {
    const double norm =
        at::linalg_vector_norm(gradient, norm_type, std::nullopt, false, at::kDouble).item<double>();
    if (std::isinf(norm_type)) {
      part = std::isnan(norm) || norm > part ? norm : part;
      if (std::isnan(part)) break;
    } else {
      part += std::pow(norm, norm_type);
    }
  }
  return part;
}

double combine(const std::vector<double>& parts, double norm_type) {
  double total = 0;
  for (const double part : parts) {
    if (!std::isinf(norm_type)) {
      total += part;
    } else if (std::isnan(part) || part > total) {
      total = part;
      if (std::isnan(total)) break;
    }
  }
  return std::isinf(norm_type) ? total : std::pow(total, 1.0 / norm_type);
}

}  // namespace

double clip_grad_norm(runtime::ShardedModel& model, double max_norm, double norm_type) {
  return clip_grad_norm(std::vector<runtime::ShardedModel*>{&model}, max_norm, norm_type);
}

double clip_grad_norm(const std::vector<runtime::ShardedModel*>& models, double max_norm, double norm_type) {
  require(max_norm >= 0, "clip_grad_norm: max_norm = ", max_norm, "; expected 0 or more");
  require(norm_type > 0, "clip_grad_norm: norm_type = ", norm_type,
          "; expected a number above 0, or infinity");
  for (const runtime::ShardedModel* model : models) model->require_complete_gradients("clip_grad_norm");
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> all;
  std::vector<double> parts;
  for (const runtime::ShardedModel* model : models) {
    std::vector<double> its = {local_part(model->counted_gradients(), norm_type)};
    if (comm::PeerGroup* counted = model->counted()) its = counted->exchange(its);
    parts.insert(parts.end(), its.begin(), its.end());
    for (const at::Tensor& shard : model->shards()) {
      if (shard.grad().defined() && shard.grad().numel() > 0) all.push_back(shard.grad());
    }
  }
  const double norm = combine(parts, norm_type);
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1)) {
    for (at::Tensor& gradient : all) gradient.mul_(factor);
  }
  return norm;
}

}  // namespace fsdpp::optim
