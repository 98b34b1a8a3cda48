#pragma once

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>

#include <cstdint>
#include <vector>

#include "fsdpp/layout/mesh.h"
#include "fsdpp/runtime/call.h"
#include "tests/support/expert_model.h"

// Experts that live on a mesh of their own: two groups of ranks hold two experts each, and experts see the
// rows of all ranks that have the same place in their group.
namespace fsdpp::test {

inline constexpr int kGroups = 2;
inline constexpr int kOwnExperts = static_cast<int>(kExperts) / kGroups;  // of a group

[[nodiscard]] inline layout::Mesh mesh_of_experts(int ranks) {
  return layout::Mesh({{"expert", kGroups}, {"shard", ranks / kGroups}});
}
[[nodiscard]] inline int group_of(int rank, int ranks) { return rank / (ranks / kGroups); }

/// Holds a group's own experts: the root of their model.
class OwnExperts : public torch::nn::Module {
 public:
  explicit OwnExperts(int group) {
    std::vector<at::Tensor> each;
    for (int e = 0; e < kOwnExperts; ++e)
      each.push_back(integers({kExpertDim, kExpertDim}, 40 + static_cast<uint64_t>(kOwnExperts * group + e)));
    weight = register_parameter("weight", at::stack(each));
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& rows, const at::Tensor& ends) const {
    return nn::grouped_linear(rows, weight, ends);
  }
  at::Tensor weight;
};

/// What `rank` has for `expert`: 0, 1 or 2 rows.
[[nodiscard]] inline at::Tensor rows_for(int rank, int expert, int step) {
  return integers({(rank + expert + step) % 3, kExpertDim},
                  1000 + static_cast<uint64_t>(100 * step + 10 * rank + expert));
}

/// The backward of a rank's own experts through the rows that come to it.
inline void backward_of_own(OwnExperts& own, int rank, int ranks, int step,
                            at::TensorOptions place = at::kFloat) {
  const int along_shard = ranks / kGroups;
  std::vector<at::Tensor> rows;
  std::vector<int32_t> sizes;
  for (int e = 0; e < kOwnExperts; ++e) {
    int32_t size = 0;
    for (int from = rank % along_shard; from < ranks; from += along_shard) {
      rows.push_back(rows_for(from, kOwnExperts * group_of(rank, ranks) + e, step));
      size += static_cast<int32_t>(rows.back().size(0));
    }
    sizes.push_back(size);
  }
  at::sum(fsdpp::call(own, at::cat(rows).to(place), ends_of(sizes).to(place.device()))).backward();
}

/// The same of all ranks' rows, where all experts are.
inline void backward_of_all(const Experts& experts, int ranks, int step, double scale = 1) {
  for (int rank = 0; rank < ranks; ++rank) {
    for (int e = 0; e < kExperts; ++e)
      (at::sum(at::linear(rows_for(rank, e, step), experts.of(e))) * scale).backward();
  }
}

}  // namespace fsdpp::test
