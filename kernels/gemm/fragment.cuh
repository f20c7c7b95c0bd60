// Operand fragments of mma.m16n8k16 from packed weights: exact bf16 values from E2M1, E4M3 and BF16
// codes, by masks and shifts. The arrangement of bits is that of pack_fragments.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/gemm/gemm_args.h"

namespace lockstep {

__device__ __forceinline__ uint32_t MulBf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// c += a b, one k16 step: a is 16 rows of the weight, b is 8 tokens.
__device__ __forceinline__ void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

constexpr uint32_t kTwoTo120 = 0x7b807b80u;  // a pair of bf16

// Two E4M3 codes in the upper bytes of the halves of `w` as a pair of bf16.
__device__ __forceinline__ uint32_t E4M3PairToBf16(uint32_t w) {
  return MulBf16x2((w & 0x80008000u) | ((w >> 4) & 0x07f007f0u), kTwoTo120);
}

// NVFP4: one word is the lane's 8 codes of a k16 step. `scales` are bytes of its two rows (row g in
// the lower one) at byte `at`. Values are 2^-8 of the true ones.
__device__ __forceinline__ void DecodeNvfp4(uint32_t w, uint32_t scales, int at, uint32_t (&a)[4]) {
  const uint32_t low = __byte_perm(scales, 0, at == 0 ? 0x4040 : 0x4242) * 16 + 0x75807580u;
  const uint32_t high = __byte_perm(scales, 0, at == 0 ? 0x4141 : 0x4343) * 16 + 0x75807580u;
  a[0] = MulBf16x2(w & 0x81c081c0u, low);
  a[1] = MulBf16x2(((w << 1) & 0x80008000u) | ((w << 3) & 0x01c001c0u), high);
  a[2] = MulBf16x2((w << 6) & 0x81c081c0u, low);
  a[3] = MulBf16x2(((w << 2) & 0x80008000u) | ((w >> 4) & 0x01c001c0u), high);
}

// FP8: two words are the lane's 8 codes of a k16 step.
__device__ __forceinline__ void DecodeFp8(uint32_t w0, uint32_t w1, uint32_t (&a)[4]) {
  a[0] = MulBf16x2(w0 & 0x87f087f0u, kTwoTo120);
  a[1] = MulBf16x2(((w0 << 4) & 0x80f080f0u) | ((w0 >> 4) & 0x07000700u), kTwoTo120);
  a[2] = MulBf16x2(w1 & 0x87f087f0u, kTwoTo120);
  a[3] = MulBf16x2(((w1 << 4) & 0x80f080f0u) | ((w1 >> 4) & 0x07000700u), kTwoTo120);
}

}  // namespace lockstep
