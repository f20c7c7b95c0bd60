// Memory accesses of the push collectives that the language has no words for: packets that a peer
// GPU writes or reads while the kernel runs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace lockstep {

__device__ __forceinline__ void StorePacket(uint4* to, uint4 p) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(p.x), "r"(p.y),
               "r"(p.z), "r"(p.w)
               : "memory");
}

__device__ __forceinline__ uint4 LoadPacket(const uint4* from) {
  uint4 p;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(p.x), "=r"(p.y), "=r"(p.z), "=r"(p.w)
               : "l"(from)
               : "memory");
  return p;
}

__device__ __forceinline__ uint32_t LoadVolatile(const uint32_t* from) {
  uint32_t x;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

// Nanoseconds.
__device__ __forceinline__ uint64_t GlobalTimer() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

}  // namespace lockstep
