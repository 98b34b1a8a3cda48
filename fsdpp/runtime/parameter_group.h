#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdpp/buffer/sharded_buffer.h"
#include "fsdpp/device/device.h"
#include "fsdpp/device/element.h"
#include "fsdpp/layout/shard_layout.h"
#include "fsdpp/runtime/options.h"
#include "fsdpp/runtime/parameter.h"

namespace fsdpp::runtime {

class InnerShards;
class RowExchange;

/// How a unit's weights are used, hence exchanged.
enum class Use {
  whole,           // gathered and reduced as a whole
  rows,            // looked up by rows, and nothing else: exchanged by rows
  rows_and_whole,  // both: an embedding that is also the head's weight
};

/// Parameters of a unit with one dtype and one requires_grad: gathered and reduced as one run of bytes.
///
/// Their tensors are views of one storage, `real`. Gathering points it at memory, releasing points it at a
/// forbidden range and the tensors at `guard`, whose access error names the unit.
struct ParameterGroup {
  int id = 0;        // among the model's groups
  int unit = 0;      // index of its unit
  std::string name;  // "layers.3", with dtype or "frozen" added when the unit has several groups
  Strategy strategy = Strategy::optim_grads_params;  // its unit's
  at::ScalarType dtype{};                            // of the model weights
  at::ScalarType main_dtype = at::kFloat;            // of main weights
  at::ScalarType gradient_dtype = at::kFloat;        // of the shards' `.grad`
  at::ScalarType wire = at::kFloat;                  // of the gradient slot
  at::Device place{at::kCPU};                        // where the lanes run and memory of the group lies
  at::Device main_place{at::kCPU};                   // of main weights: `place`, or the host's
  bool trainable = true;
  std::vector<std::shared_ptr<Parameter>> parameters;
  std::shared_ptr<const layout::ShardLayout> layout;
  /// Who has which main weights: `layout`, or (sharded over replicas too) one that cuts its shards further.
  std::shared_ptr<const layout::ShardLayout> main_layout;
  int main_part = 0;        // this rank's in main_layout
  int64_t main_offset = 0;  // where that begins in this rank's shard, elements

  c10::Storage real;
  c10::Storage guard;
  std::shared_ptr<device::ForbiddenRange> forbidden;
  std::shared_ptr<device::Memory> main;     // main weights: the shard, or the whole under no_shard
  std::shared_ptr<device::Memory> weights;  // no_shard only: the whole model weights; may be `main` itself
  std::optional<buffer::ShardedBuffer> published;  // but for no_shard: the ranks' published shards
  /// Where the full weights stay (full_bytes()), this rank's part being what it publishes; null: they come
  /// and go.
  std::byte* own_place = nullptr;
  Use use = Use::whole;
  RowExchange* rows = nullptr;   // unless `use` is whole
  InnerShards* inner = nullptr;  // where neighbours keep the weights
  at::Tensor gradient;           // shards_gradients() on a flat mesh: the gradient shard, kept over steps

  [[nodiscard]] bool is_gathered() const noexcept { return use != Use::rows; }
  [[nodiscard]] int64_t element_bytes() const noexcept { return layout->element_bytes(); }
  [[nodiscard]] int64_t full_bytes() const noexcept { return layout->full_numel() * element_bytes(); }
  [[nodiscard]] int64_t shard_bytes() const noexcept { return layout->shard_numel() * element_bytes(); }
  /// Elements of main weights on this rank under a strategy that shards them.
  [[nodiscard]] int64_t main_numel() const noexcept { return main_layout->shard_numel(); }
  [[nodiscard]] int64_t main_bytes(int64_t elements) const noexcept {
    return elements * static_cast<int64_t>(c10::elementSize(main_dtype));
  }
  /// Sums are made in fp32 and then rounded to where they are stored.
  [[nodiscard]] bool rounds_sums() const noexcept { return gradient_dtype != at::kFloat; }
  [[nodiscard]] int64_t slot_bytes() const noexcept {
    return layout->full_numel() * static_cast<int64_t>(c10::elementSize(wire));
  }

  /// The full weights, where they lie at present.
  [[nodiscard]] ByteRange weights_range() const {
    return {real.data(), static_cast<std::size_t>(full_bytes())};
  }

  /// Points the parameters at `memory` (full_bytes() bytes of model weights).
  void attach(std::byte* memory);
  /// Takes the parameters' memory away: their accesses throw, views of them fault with a message.
  void detach();
};

/// Says that the compute lane reads the full weights of `groups`, which are here: said when it begins and
/// when it ends, since the reads between run inside libtorch.
void announce_use(device::Device& device, const char* what, const std::vector<ParameterGroup*>& groups);

/// How our kernels store what libtorch stores as `dtype`. Throws UsageError unless it is float, bfloat16 or
/// half.
[[nodiscard]] device::Element element_of(at::ScalarType dtype);

/// A tensor of `sizes` over `data`, which `owner` keeps alive as long as the tensor's storage lives.
[[nodiscard]] at::Tensor tensor_over(std::shared_ptr<void> owner, void* data, at::IntArrayRef sizes,
                                     at::TensorOptions options);

/// Elements in memory.
struct Elements {
  std::byte* data;
  at::ScalarType dtype;
  at::Device place = at::kCPU;

  /// [count], borrowed.
  [[nodiscard]] at::Tensor tensor(int64_t count) const;
};

/// Copies `parameter`'s elements [offset, offset + count) to `target`.
void copy_elements(const at::Tensor& parameter, int64_t offset, int64_t count, const Elements& target);

/// Copies `count` elements, rounding to nearest even where `target` has fewer bits; both at one place.
void cast_elements(const Elements& source, int64_t count, const Elements& target);

/// Takes the parameters' present values into main weights (the rank's shard, or the whole under no_shard),
/// makes the shards that optimizers update, and re-points the parameters: attached under no_shard, else
/// detached. `offload`: main weights lie in host memory. Padding is filled with NaN, so that a read of it
/// shows. `group` has name, strategy, dtypes, place, parameters and layouts set; its parameters may lie
/// elsewhere until now.
void take_over(ParameterGroup& group, bool offload, device::Device& device,
               const std::shared_ptr<device::Ledger>& ledger);

}  // namespace fsdpp::runtime
