#include "fsdpp/runtime/check_data.h"

#include <ATen/EmptyTensor.h>

#include <string>
#include <unordered_set>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/runtime/registry.h"

namespace fsdpp::runtime {
namespace {

using torch::nn::Module;

constexpr std::size_t kNamed = 20;  // in the message: more are counted

bool has_data(const at::Tensor& tensor) {
  if (tensor.is_meta()) return false;
  if (!tensor.has_storage()) return true;  // sparse, say: it has its data elsewhere
  return tensor.storage().nbytes() >=
         at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                          static_cast<std::size_t>(tensor.storage_offset()));
}

struct Walk {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::vector<std::string> without;  // in registration order, tied ones once

  void look_at(const char* kind, const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined() || has_data(tensor)) return;
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) without.push_back(kind + name);
  }
  void visit(const Module& module, const std::string& prefix) {
    if (find_unit(module).unit >= 0) return;
    for (const auto& item : module.named_parameters(/*recurse=*/false))
      look_at("parameter ", prefix + item.key(), item.value());
    for (const auto& item : module.named_buffers(/*recurse=*/false))
      look_at("buffer ", prefix + item.key(), item.value());
    for (const auto& child : module.named_children()) visit(*child.value(), prefix + child.key() + ".");
  }
};

}  // namespace

void check_data(const Module& root) {
  Walk walk;
  walk.visit(root, "");
  if (walk.without.empty()) return;
  std::string names;
  for (std::size_t i = 0; i < walk.without.size() && i < kNamed; ++i)
    names += (i == 0 ? "" : ", ") + walk.without[i];
  if (walk.without.size() > kNamed) names += text(" and ", walk.without.size() - kNamed, " more");
  require(
      false,
      "fully_shard: these have no data (they are on the meta device, or their storage ends before they do): ",
      names, "; materialise and initialise them before fully_shard(): register tensors with data on the CPU");
}

}  // namespace fsdpp::runtime
