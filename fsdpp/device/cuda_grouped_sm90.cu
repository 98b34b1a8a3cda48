#include <cuda.h>

#include <algorithm>

#include "fsdpp/base/error.h"
#include "fsdpp/device/cuda_check.h"
#include "fsdpp/device/cuda_element.cuh"
#include "fsdpp/device/cuda_grouped_sm90.h"
#include "fsdpp/device/cuda_grouped_walk.cuh"
#include "fsdpp/device/cuda_hopper.cuh"

// Clusters of two blocks walk over the outputs' tiles, two tiles below each other at a time: the blocks share
// the columns of `right`, so each loads half of them for both. In a block, one thread has the copy engine
// fill a ring of stages of 64 rows, a warp cleans away the rows of others, and two warpgroups multiply, each
// its half of the tile, and write the sums from their registers while the ring fills for the next tile.
namespace fsdpp::device {
namespace {

constexpr int kStages = 4;  // as many as shared memory holds
constexpr int kProducerWarps = 4;
constexpr int kConsumerWarps = 8;
constexpr int kThreads = 32 * (kProducerWarps + kConsumerWarps);

// A stage is six panels: 64 columns of kDepth rows each, two of `left`, then four of `right`.
constexpr int kPanelColumns = 64;
constexpr int kLeftPanels = kTileM / kPanelColumns;
constexpr int kPanels = kLeftPanels + kTileN / kPanelColumns;
constexpr uint32_t kRowBytes = 128;
constexpr uint32_t kPanelBytes = kDepth * kRowBytes;
constexpr uint32_t kStageBytes = kPanels * kPanelBytes;
constexpr uint32_t kAlignment = 1024;  // of panels, for the copy engine's swizzle
constexpr uint32_t kDynamicBytes = kStages * kStageBytes + kAlignment;

struct Shared {
  uint64_t loaded[kStages];  // all bytes are there
  uint64_t ready[kStages];   // and the rows of others are zero
  uint64_t empty[kStages];   // both blocks' consumers are done
  Groups groups;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using namespace hopper;

// A product of 16 rows, in descriptors' units of 16 bytes.
constexpr uint64_t kStep = 16 * kRowBytes / 16;

// Which stage of the ring is next, and the parity of its barriers' phase.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// One thread: fills the ring.
__device__ void produce(const CUtensorMap& left, const CUtensorMap& right, Walk walk, Shared& shared,
                        uint32_t stages) {
  constexpr uint16_t kBothBlocks = 3;
  constexpr int kShare = (kPanels - kLeftPanels) / 2;
  const int first_panel = static_cast<int>(cluster_rank()) * kShare;
  Ring ring;
  Tile tile;
  while (walk.next(tile)) {
    const int count = tile.stages();
    for (int k = 0; k < count; ++k, ring.next()) {
      const uint32_t loaded = shared_address(&shared.loaded[ring.stage]);
      const uint32_t base = stages + ring.stage * kStageBytes;
      const int row = tile.begin + k * kDepth;
      wait(shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
      arrive_and_expect(loaded, kStageBytes);
      for (int p = 0; p < kLeftPanels; ++p)
        load_box(base + p * kPanelBytes, &left, tile.row0 + p * kPanelColumns, row, loaded);
      for (int p = first_panel; p < first_panel + kShare; ++p) {
        load_box_to(kBothBlocks, base + (kLeftPanels + p) * kPanelBytes, &right,
                    tile.column0 + p * kPanelColumns, row, loaded);
      }
    }
  }
}

// One warp: behind a group's last row, zeros up to the next multiple of 16, the depth of one product. Both
// operands, since 0 * NaN is NaN. Stages pass through here whether or not there is something to clean, so
// that consumers wait for one barrier; the ring hides the detour.
__device__ void clean(Walk walk, Shared& shared, uint32_t stages) {
  constexpr uint32_t kPieces = kRowBytes / sizeof(uint4);
  const uint32_t lane = threadIdx.x % 32;
  Ring ring;
  Tile tile;
  while (walk.next(tile)) {
    const int count = tile.stages();
    for (int k = 0; k < count; ++k, ring.next()) {
      wait(shared_address(&shared.loaded[ring.stage]), ring.parity);
      const int rows = tile.rows - k * kDepth;
      if (rows == 0 || (rows < kDepth && rows % 16 != 0)) {
        const uint32_t first = stages + ring.stage * kStageBytes + rows * kRowBytes;
        for (uint32_t p = 0; p < kPanels; ++p) {
          for (uint32_t i = lane; i < (16 - rows % 16) * kPieces; i += 32)
            store_zeros(first + p * kPanelBytes + i * sizeof(uint4));
        }
        fence_async_proxy();
      }
      __syncwarp();
      if (lane == 0) arrive(shared_address(&shared.ready[ring.stage]));
    }
  }
}

// The first `rows` rows of a stage, rounded up to a multiple of 16.
template <class T>
__device__ __forceinline__ void multiply_stage(float (&d)[128], uint64_t left, uint64_t right, int rows,
                                               bool keep) {
  fence_tile();
  multiply_add<T>(d, left, right, keep);
  if (rows > 32) {
    multiply_add<T>(d, left + kStep, right + kStep, true);
    multiply_add<T>(d, left + 2 * kStep, right + 2 * kStep, true);
    if (rows > 48) multiply_add<T>(d, left + 3 * kStep, right + 3 * kStep, true);
  } else if (rows > 16) {
    multiply_add<T>(d, left + kStep, right + kStep, true);
  }
  commit_products();
}

// Neighbouring threads exchange halves of their columns, so that each has four columns of one row: 16 bytes,
// and a row's four threads 64 in a run. All old numbers of a row are under way before the first is needed.
__device__ __forceinline__ void store_tile(const float (&d)[128], const Tile& tile, const Grid& grid,
                                           const GroupTable& table, int first_row) {
  constexpr int kQuads = kTileN / 16;
  const uint32_t lane = threadIdx.x % 32;
  const bool odd = lane % 2 != 0;
  const bool add = adds(table, tile.group);
  const float scale = table.scale;
  const int column0 = tile.column0 + (odd ? 8 : 0) + (lane / 2 % 2 != 0 ? 4 : 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + static_cast<int>(lane / 4) + 8 * half;
    const int columns = row < grid.m ? grid.n - column0 : 0;
    float* const out = table.out[tile.group] + static_cast<int64_t>(row) * grid.n + column0;
    float4 old[kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (add && 16 * q < columns) old[q] = __ldcs(reinterpret_cast<const float4*>(out + 16 * q));
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const float* const near = d + 8 * q + 2 * half;
      const float2 a = {near[0], near[1]};
      const float2 b = {near[4], near[5]};
      const float x = __shfl_xor_sync(0xFFFFFFFF, odd ? a.x : b.x, 1);
      const float y = __shfl_xor_sync(0xFFFFFFFF, odd ? a.y : b.y, 1);
      float4 v = odd ? make_float4(x, y, b.x, b.y) : make_float4(a.x, a.y, x, y);
      v = {__fmul_rn(scale, v.x), __fmul_rn(scale, v.y), __fmul_rn(scale, v.z), __fmul_rn(scale, v.w)};
      if (add) {
        v = {__fmaf_rn(table.kept, old[q].x, v.x), __fmaf_rn(table.kept, old[q].y, v.y),
             __fmaf_rn(table.kept, old[q].z, v.z), __fmaf_rn(table.kept, old[q].w, v.w)};
      }
      if (16 * q < columns) __stcs(reinterpret_cast<float4*>(out + 16 * q), v);
    }
  }
}

// Two warpgroups. One stage's products run while the next one's are issued, so a stage is free one later.
template <class T>
__device__ void consume(Walk walk, const Grid& grid, const GroupTable& table, Shared& shared, uint32_t stages,
                        int warp) {
  const int half = warp / 4;
  float d[128];
  Ring ring;
  Tile tile;
  const auto release = [&](int stage) {
    if (threadIdx.x % 32 < 2) arrive_at(shared_address(&shared.empty[stage]), threadIdx.x % 32);
  };
  while (walk.next(tile)) {
    int previous = 0;
    const auto multiply = [&](int k, int rows) {
      const uint32_t base = stages + ring.stage * kStageBytes;
      wait(shared_address(&shared.ready[ring.stage]), ring.parity);
      multiply_stage<T>(d, describe_panels(base + half * kPanelBytes, kPanelBytes),
                        describe_panels(base + kLeftPanels * kPanelBytes, kPanelBytes), rows, k > 0);
      wait_products<1>();
      if (k > 0) release(previous);
      previous = ring.stage;
      ring.next();
    };
    // Known to be the same in all threads: else the compiler puts the products one after the other (C7520).
    const int rows = __shfl_sync(0xFFFFFFFF, tile.rows, 0);
    const int whole = rows / kDepth;
    for (int k = 0; k < whole; ++k) multiply(k, kDepth);
    if (whole == 0 || rows % kDepth != 0) multiply(whole, rows % kDepth);
    wait_products<0>();
    release(previous);
    store_tile(d, tile, grid, table, tile.row0 + warp * 16);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_sm90_kernel(const __grid_constant__ CUtensorMap left, const __grid_constant__ CUtensorMap right,
                        const __grid_constant__ GroupTable table, const __grid_constant__ Grid grid) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char dynamic[];
  __shared__ Shared shared;
  const uint32_t stages = (shared_address(dynamic) + kAlignment - 1) / kAlignment * kAlignment;
  const int warp = static_cast<int>(__shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0));  // known to be uniform
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&left);
    prefetch_tensor_map(&right);
    for (int s = 0; s < kStages; ++s) {
      init_barrier(shared_address(&shared.loaded[s]), 1);
      init_barrier(shared_address(&shared.ready[s]), 1);
      init_barrier(shared_address(&shared.empty[s]), 2 * kConsumerWarps);
    }
    fence_barrier_init();
  }
  const Walk walk(grid, shared.groups, order_groups(shared.groups, table));
  cluster_sync();
  if (warp < kProducerWarps) {
    give_registers<56>();  // 128 * 56 + 256 * 224 registers = what the launch has, 384 * 168
    if (threadIdx.x == 0) produce(left, right, walk, shared, stages);
    if (warp == 1) clean(walk, shared, stages);
    __syncwarp();
  } else {
    take_registers<224>();
    consume<T>(walk, grid, table, shared, stages, warp - kProducerWarps);
  }
  cluster_sync();  // the other block's last stage and arrivals come to this block's memory
#endif
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time: libcuda is not linked, so that our library loads without a GPU.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    constexpr unsigned kSinceCuda = 12'000;
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    FSDPP_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kSinceCuda,
                                                cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess)
      throw EnvironmentError("CUDA: the driver has no cuTensorMapEncodeTiled; it is too old for this GPU");
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return function;
}

// Boxes of a panel.
CUtensorMap panels_of(const void* matrix, Element element, int64_t rows, int64_t columns) {
  const auto type =
      element == Element::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes[] = {sizes[0] * element_size(element)};
  const cuuint32_t box[] = {kPanelColumns, kDepth};
  const cuuint32_t steps[] = {1, 1};
  CUtensorMap map;
  const CUresult status = encode_tiled()(
      &map, type, 2, const_cast<void*>(matrix), sizes, row_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw EnvironmentError(text("CUDA: error ", static_cast<int>(status),
                                " from cuTensorMapEncodeTiled for a matrix of ", rows, " x ", columns));
  }
  return map;
}

template <class T>
void launch(Stream stream, const GroupedProduct& product, const GroupTable& table) {
  const auto m = static_cast<int>(product.m);
  const auto n = static_cast<int>(product.n);
  const Grid grid = {m, n, (m - 1) / (2 * kTileM) + 1, (n - 1) / kTileN + 1};
  const int clusters =
      std::min(table.count * grid.pairs_m * grid.tiles_n, std::max(1, multiprocessors() / 2));
  const auto kernel = grouped_sm90_kernel<T>;
  FSDPP_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kDynamicBytes));
  // The cluster's size as an attribute of the launch: in the kernel's declaration it would not compile for
  // earlier GPUs.
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(2 * clusters);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kDynamicBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  FSDPP_CUDA(
      cudaLaunchKernelEx(&config, kernel, panels_of(product.left, product.element, product.rows, product.m),
                         panels_of(product.right, product.element, product.rows, product.n), table, grid));
}

// Whether the current device has the kernel, and not the empty one of another target than sm_90a: that one
// has no shared memory.
bool compiled() {
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, grouped_sm90_kernel<__nv_bfloat16>) != cudaSuccess) {
    cudaGetLastError();  // no code for this device: not to be reported by whoever asks next
    return false;
  }
  return attributes.sharedSizeBytes >= sizeof(Shared);
}

}  // namespace

bool grouped_sm90_suits(const GroupedProduct& product, const GroupTable& table) {
  const auto aligned = [](const void* pointer) { return is_aligned(pointer, 16); };
  const bool half = product.element == Element::bf16 || product.element == Element::fp16;
  return half && product.m % 8 == 0 && product.n % 8 == 0 && product.rows > 0 && aligned(product.left) &&
         aligned(product.right) && std::all_of(table.out, table.out + table.count, aligned) && compiled();
}

void grouped_sm90(Stream stream, const GroupedProduct& product, const GroupTable& table) {
  if (product.element == Element::bf16) {
    launch<__nv_bfloat16>(stream, product, table);
  } else {
    launch<__half>(stream, product, table);
  }
}

}  // namespace fsdpp::device
