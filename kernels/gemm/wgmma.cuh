// Warpgroup products of sm_90a: 64 rows of the weight from registers, tokens from shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace lockstep {

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending of the groups committed last are on their way.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Descriptor of a tile [tokens, 64] of bf16 whose rows of 128 bytes are swizzled by the copy; the
// tile begins at a multiple of 1024 bytes. Steps of k16 are 32 bytes apart: + 2 each.
__device__ __forceinline__ uint64_t TileDescriptor(const void* tile) {
  const uint64_t address = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
  constexpr uint64_t kEightRows = 1024;
  constexpr uint64_t kSwizzle128 = 1;
  return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | (kEightRows >> 4) << 32 | kSwizzle128 << 62;
}

#define LOCKSTEP_ACC8(i)                                                                      \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
      "+f"(c[i + 6]), "+f"(c[i + 7])

// c += a b for 128 tokens, one k16 step.
__device__ __forceinline__ void Wgmma(float (&c)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.eq.u32 accumulate, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, accumulate, 1, 1, 0;\n"
      "}\n"
      : LOCKSTEP_ACC8(0), LOCKSTEP_ACC8(8), LOCKSTEP_ACC8(16), LOCKSTEP_ACC8(24), LOCKSTEP_ACC8(32),
        LOCKSTEP_ACC8(40), LOCKSTEP_ACC8(48), LOCKSTEP_ACC8(56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The same for 64 tokens.
__device__ __forceinline__ void Wgmma(float (&c)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.eq.u32 accumulate, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, accumulate, 1, 1, 0;\n"
      "}\n"
      : LOCKSTEP_ACC8(0), LOCKSTEP_ACC8(8), LOCKSTEP_ACC8(16), LOCKSTEP_ACC8(24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef LOCKSTEP_ACC8

template <int kRegisters>
__device__ __forceinline__ void RaiseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void LowerRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace lockstep
