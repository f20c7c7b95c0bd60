// Barriers in shared memory and the copies that complete on them (sm_90).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace lockstep {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void BarrierInit(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialized barriers known to the copy engine.
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives, and lets the phase wait for `bytes` of copies.
__device__ __forceinline__ void BarrierExpect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void BarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

__device__ __forceinline__ void BarrierWait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// 16-byte aligned on both sides, a multiple of 16 bytes. Global data that is read once.
__device__ __forceinline__ void BulkCopy(void* to, const void* from, uint32_t bytes,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(to)),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

// A box of a 2-dimensional tensor, its first element at (column, row).
__device__ __forceinline__ void TensorCopy(void* to, const void* tensor_map, int column, int row,
                                           uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(SharedAddress(to)),
      "l"(tensor_map), "r"(column), "r"(row), "r"(SharedAddress(barrier))
      : "memory");
}

// Lets the next kernel of the stream start before this one ends, if it was launched to; and waits
// for the end of the kernel before, whose memory must not be touched earlier.
__device__ __forceinline__ void LaunchDependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void WaitForPrerequisites() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace lockstep
