#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdpp/buffer/sharded_buffer.h"
#include "fsdpp/device/memory.h"
#include "fsdpp/layout/shard_layout.h"
#include "fsdpp/runtime/options.h"
#include "fsdpp/runtime/parameter.h"

namespace fsdpp::runtime {

/// Parameters of a unit with one dtype and one requires_grad: gathered and reduced as one run of bytes.
///
/// Their tensors are views of one storage, `real`. Gathering points it at memory, releasing points it at a
/// forbidden range and the tensors at `guard`, whose access error names the unit.
struct ParameterGroup {
  int id = 0;              // among the model's groups
  int unit = 0;            // index of its unit
  std::string name;        // "layers.3", with dtype or "frozen" added when the unit has several groups
  at::ScalarType dtype{};  // of the model weights
  bool trainable = true;
  std::vector<std::shared_ptr<Parameter>> parameters;
  std::shared_ptr<const layout::ShardLayout> layout;

  c10::Storage real;
  c10::Storage guard;
  std::shared_ptr<device::ForbiddenRange> forbidden;
  std::shared_ptr<device::HostMemory> main;  // fp32 main weights: the shard, or the whole under no_shard
  std::shared_ptr<device::HostMemory>
      weights;  // no_shard only: the whole model weights; may be `main` itself
  std::optional<buffer::ShardedBuffer> published;  // optim_grads_params: the ranks' published shards
  at::Tensor gradient;                             // optim_grads_params: fp32 gradient shard, kept over steps

  [[nodiscard]] int64_t element_bytes() const noexcept { return layout->element_bytes(); }
  [[nodiscard]] int64_t full_bytes() const noexcept { return layout->full_numel() * element_bytes(); }
  [[nodiscard]] int64_t shard_bytes() const noexcept { return layout->shard_numel() * element_bytes(); }
  [[nodiscard]] int64_t slot_bytes() const noexcept { return layout->full_numel() * 4; }  // fp32

  /// Points the parameters at `memory` (full_bytes() bytes of model weights).
  void attach(std::byte* memory);
  /// Takes the parameters' memory away: their accesses throw, views of them fault with a message.
  void detach();
};

/// A tensor of `sizes` over `data`, which `owner` keeps alive as long as the tensor's storage lives.
[[nodiscard]] at::Tensor tensor_over(std::shared_ptr<void> owner, void* data, at::IntArrayRef sizes,
                                     at::ScalarType dtype);

/// Copies `parameter`'s elements [offset, offset + count) as fp32 to `target`.
void copy_elements(const at::Tensor& parameter, int64_t offset, int64_t count, float* target);

/// Writes `count` fp32 elements as `dtype` to `target`, rounding to nearest even.
void cast_elements(const float* source, int64_t count, at::ScalarType dtype, std::byte* target);

/// Takes the parameters' present values into main weights (the rank's shard, or the whole under no_shard),
/// makes the shards that optimizers update, and re-points the parameters: attached under no_shard, else
/// detached. Padding is filled with NaN, so that a read of it shows. `group` has name, dtype, parameters and
/// layout set.
void take_over(ParameterGroup& group, Strategy strategy, int rank,
               const std::shared_ptr<device::Ledger>& ledger);

}  // namespace fsdpp::runtime
