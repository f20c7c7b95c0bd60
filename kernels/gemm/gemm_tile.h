// Lays rows of x out as tiles of the CPU arm, one function per instruction set.
#pragma once

#include <cstdint>

namespace lockstep {

#define LOCKSTEP_DECLARE_GEMM_TILE(isa)                                                           \
  namespace isa {                                                                                 \
  /* out[c * tokens + t] = x[t * stride + c] for t < tokens <= 16 and c < k; x is BF16 or         \
     F32. */                                                                                      \
  void FillTile(const void* x, bool bf16, int64_t stride, int64_t tokens, int64_t k, float* out); \
  }
LOCKSTEP_DECLARE_GEMM_TILE(generic)
LOCKSTEP_DECLARE_GEMM_TILE(avx2)
LOCKSTEP_DECLARE_GEMM_TILE(avx512)
#undef LOCKSTEP_DECLARE_GEMM_TILE

}  // namespace lockstep
