#pragma once

#include <cstdint>
#include <span>

#include "fsdpp/device/element.h"
#include "fsdpp/device/grouped.h"
#include "fsdpp/device/rows.h"

namespace fsdpp::device {

class OptimizerKernels;

/// Arithmetic of ours on a device's memory. Called inside an operation's work: it runs in the lane's order.
class Kernels {
 public:
  virtual ~Kernels() = default;

  /// out[i] = (add_to_out ? out[i] : 0) + scale * (((s0[i] + s1[i]) + s2[i]) + ...), rounded after each
  /// operation: the same bits on every device. Sources are stored as `wire`; `out`, scale and arithmetic are
  /// sum_element(wire). `out` may be one of the sources that are stored like it, when not adding.
  virtual void sum_in_rank_order(void* out, std::span<const void* const> sources, Element wire, int64_t count,
                                 double scale, bool add_to_out) const = 0;
  /// Rows of a table that is cut over ranks, and sums of looked-up rows' gradients: see rows.h.
  virtual void gather_rows(void* out, const int64_t* ids, int64_t count, const RowTable& table) const = 0;
  virtual void add_rows(const RowSums& out, const SortedIds& ids, const RowGradients& gradients, float scale,
                        bool add_to_out) const = 0;
  /// Weight gradients of a grouped linear layer: out[g] (fp32 [m, n]) is overwritten by the product of group
  /// first + g, or (add[g] is not 0) added to; see cuda_grouped.h. On GPUs alone: throws UsageError.
  virtual void grouped_products(const GroupedProduct& product, std::span<float* const> out,
                                std::span<const uint8_t> add) const = 0;
  /// Null where ATen's optimizers are used.
  [[nodiscard]] virtual const OptimizerKernels* optimizer() const noexcept { return nullptr; }
};

/// Those of the host.
[[nodiscard]] const Kernels& host_kernels();
/// Those of GPUs. Throws UsageError where none were provided, as making a CUDA device does (device/cuda.h).
[[nodiscard]] const Kernels& gpu_kernels();
[[nodiscard]] bool has_gpu_kernels() noexcept;
void provide_gpu_kernels(const Kernels& kernels) noexcept;

}  // namespace fsdpp::device
