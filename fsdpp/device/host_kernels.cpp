#include <atomic>

#include "fsdpp/base/error.h"
#include "fsdpp/device/kernels.h"
#include "fsdpp/device/sum.h"

namespace fsdpp::device {
namespace {

class HostKernels final : public Kernels {
 public:
  void sum_in_rank_order(void* out, std::span<const void* const> sources, Element wire, int64_t count,
                         double scale, bool add_to_out) const override {
    device::sum_in_rank_order(out, sources, wire, count, scale, add_to_out);
  }
  void gather_rows(void* out, const int64_t* ids, int64_t count, const RowTable& table) const override {
    device::gather_rows(out, {ids, static_cast<std::size_t>(count)}, table);
  }
  void add_rows(const RowSums& out, const SortedIds& ids, const RowGradients& gradients, float scale,
                bool add_to_out) const override {
    device::add_rows(out, ids, gradients, scale, add_to_out);
  }
  void grouped_products(const GroupedProduct& /*product*/, std::span<float* const> /*out*/,
                        std::span<const uint8_t> /*add*/) const override {
    throw UsageError("grouped_products on the host: use ATen's products, group by group");
  }
};

std::atomic<const Kernels*> provided = nullptr;

}  // namespace

const Kernels& gpu_kernels() {
  const Kernels* kernels = provided.load();
  require(kernels != nullptr,
          "this needs kernels on a GPU, but no CUDA device was made in this process; make one "
          "(device::make_cuda_device) and link fsdpp::cuda");
  return *kernels;
}

bool has_gpu_kernels() noexcept { return provided.load() != nullptr; }

void provide_gpu_kernels(const Kernels& kernels) noexcept { provided = &kernels; }

const Kernels& host_kernels() {
  static const HostKernels kernels;
  return kernels;
}

}  // namespace fsdpp::device
