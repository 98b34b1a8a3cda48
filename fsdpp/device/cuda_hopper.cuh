#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

// Hopper's instructions for kernels built on its copy engine and tensor cores, one function each. Chapters
// are of "Parallel Thread Execution ISA" 9.0 (NVIDIA). Addresses are of shared memory, 32 bits wide. Those
// that only the target sm_90a has are inside of `#ifdef __CUDA_ARCH_FEAT_SM90_ALL`.
namespace fsdpp::device::hopper {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Barriers in shared memory (chapter "mbarrier"): a phase ends when all arrivals and announced bytes are in.

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/// After init_barrier(), before the cluster's barrier: so that the copy engine and the other block see them.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// Arrives at the barrier at the same place of the shared memory of block `rank` of the cluster. Releases to
/// its own block only: the scope of the cluster would wait for all of this thread's stores to global memory.
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

/// Waits for the end of the phase of this parity: 0 for a barrier's first, 1 for its second, and so on. At a
/// new barrier, parity 1 does not wait.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Copies of boxes of a tensor map to shared memory (chapter "cp.async.bulk.tensor"); `tensor_map` is the
// address of a __grid_constant__ parameter. Outside of the tensor there are zeros. The bytes count at
// `barrier`.

__device__ __forceinline__ void prefetch_tensor_map(const void* tensor_map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_map) : "memory");
}

__device__ __forceinline__ void load_box(uint32_t target, const void* tensor_map, int column, int row,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], "
      "[%4];" ::"r"(target),
      "l"(tensor_map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

/// The same to the same place in every block of the cluster whose bit is set in `blocks`, counting at the
/// barrier at the same place there.
__device__ __forceinline__ void load_box_to(uint16_t blocks, uint32_t target, const void* tensor_map,
                                            int column, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(tensor_map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void store_zeros(uint32_t target) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(target), "r"(0) : "memory");
}

/// Between this thread's ordinary accesses of shared memory and the copy engine's or tensor cores' (chapter
/// "Async proxy").
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Describes an operand in shared memory whose rows are the sum's index k and contiguous: panels of 64
/// elements of m or n, a row of 128 bytes for every k, `panel_bytes` from one panel to the next. Row k's
/// 16-byte pieces are exchanged by k mod 8, as the copy engine does it with CU_TENSOR_MAP_SWIZZLE_128B;
/// panels begin at multiples of 1024 bytes, and a step of 16 k is 2048 bytes further.
///
/// Chapter "Asynchronous Warpgroup Level Matrix Shared Memory Layout", sections "Strides" and "Matrix
/// Descriptor Format": bits 0-13 address, 16-29 leading offset (here between panels), 32-45 stride offset
/// (here between 8 k and the next 8), all in units of 16 bytes; bits 62-63 = 1: 128-byte swizzle.
__device__ __forceinline__ uint64_t describe_panels(uint32_t address, uint32_t panel_bytes) {
  constexpr uint64_t kEightRows = 8 * 128;
  return uint64_t{1} << 62 | kEightRows >> 4 << 32 | static_cast<uint64_t>(panel_bytes >> 4) << 16 |
         (address & 0x3FFFF) >> 4;
}

/// Before the first multiply_add() on a tile and after accesses of its registers.
__device__ __forceinline__ void fence_tile() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits until at most `kPending` committed groups of products are under way.
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define FSDPP_FOUR(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define FSDPP_SIXTEEN(i) FSDPP_FOUR(i), FSDPP_FOUR((i) + 4), FSDPP_FOUR((i) + 8), FSDPP_FOUR((i) + 12)
#define FSDPP_MULTIPLY_ADD(type)                                                                       \
  asm volatile(                                                                                        \
      "{\n"                                                                                            \
      ".reg .pred keep;\n"                                                                             \
      "setp.ne.b32 keep, %130, 0;\n"                                                                   \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                     \
      " {"                                                                                             \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                         \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "               \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "               \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "               \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "               \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "               \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "   \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
      "}, %128, %129, keep, 1, 1, 1, 1;\n"                                                             \
      "}"                                                                                              \
      : FSDPP_SIXTEEN(0), FSDPP_SIXTEEN(16), FSDPP_SIXTEEN(32), FSDPP_SIXTEEN(48), FSDPP_SIXTEEN(64),  \
        FSDPP_SIXTEEN(80), FSDPP_SIXTEEN(96), FSDPP_SIXTEEN(112)                                       \
      : "l"(left), "l"(right), "r"(static_cast<int>(keep)))

/// d = left^T @ right, added to d if `keep`, by a warpgroup for a tile of 64 x 256 and 16 k; both operands as
/// described by describe_panels(). Runs on until wait_products(). Thread t of 128 has in d[4 j + 2 i + e] the
/// element of row 16 (t / 32) + t % 32 / 4 + 8 i and column 8 j + t % 4 * 2 + e (chapter "Register Fragments
/// for wgmma.mma_async.m64nNk16").
template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[128], uint64_t left, uint64_t right, bool keep) {
  if constexpr (std::is_same_v<T, __half>) {
    FSDPP_MULTIPLY_ADD("f16");
  } else {
    FSDPP_MULTIPLY_ADD("bf16");
  }
}

#undef FSDPP_MULTIPLY_ADD
#undef FSDPP_SIXTEEN
#undef FSDPP_FOUR

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace fsdpp::device::hopper
