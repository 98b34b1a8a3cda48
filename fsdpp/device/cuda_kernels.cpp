#include "fsdpp/device/cuda_kernels.h"

#include <c10/cuda/CUDAStream.h>

#include "fsdpp/device/cuda_adamw.h"
#include "fsdpp/device/cuda_grouped.h"
#include "fsdpp/device/cuda_norm.h"
#include "fsdpp/device/cuda_rows.h"
#include "fsdpp/device/cuda_sum.h"

namespace fsdpp::device {
namespace {

Stream stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

class CudaOptimizerKernels final : public OptimizerKernels {
 public:
  void advance(int64_t* step_counter) const override { cuda_advance_step(stream(), step_counter); }
  void adamw(const AdamwRun* runs, int run_count, int64_t tiles, Element model,
             const AdamwStep& step) const override {
    cuda_adamw(stream(), runs, run_count, tiles, model, step);
  }
  void norm_part(const NormRun* runs, int run_count, int64_t tiles, double norm_type, double* workspace,
                 double* part) const override {
    cuda_norm_part(stream(), runs, run_count, tiles, norm_type, workspace, part);
  }
  void clip_factor(const double* parts, int ranks, double norm_type, double max_norm, double* norm,
                   float* factor) const override {
    cuda_clip_factor(stream(), parts, ranks, norm_type, max_norm, norm, factor);
  }
};

class CudaKernels final : public Kernels {
 public:
  void sum_in_rank_order(void* out, std::span<const void* const> sources, Element wire, int64_t count,
                         double scale, bool add_to_out) const override {
    cuda_sum_in_rank_order(stream(), out, sources, wire, count, scale, add_to_out);
  }
  void gather_rows(void* out, const int64_t* ids, int64_t count, const RowTable& table) const override {
    cuda_gather_rows(stream(), out, ids, count, table);
  }
  void add_rows(const RowSums& out, const SortedIds& ids, const RowGradients& gradients, float scale,
                bool add_to_out) const override {
    cuda_add_rows(stream(), out, ids, gradients, scale, add_to_out);
  }
  void grouped_products(const GroupedProduct& product, std::span<float* const> out,
                        std::span<const uint8_t> add) const override {
    cuda_grouped_products(stream(), product, out, add);
  }
  [[nodiscard]] const OptimizerKernels* optimizer() const noexcept override { return &optimizer_; }

 private:
  CudaOptimizerKernels optimizer_;
};

}  // namespace

const Kernels& cuda_kernels() {
  static const CudaKernels kernels;
  return kernels;
}

}  // namespace fsdpp::device
