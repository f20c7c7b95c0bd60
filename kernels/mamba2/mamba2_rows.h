// The vector loops of the Mamba2 mixer's CPU arm, one function per instruction set. Plain structs
// of pointers; the host entry checks them.
#pragma once

#include <cstdint>

#include "kernels/batch/batch_rows.h"

namespace lockstep {

constexpr int64_t kMaxMamba2Dim = 256;           // of heads and states
constexpr int64_t kMaxMamba2GroupWidth = 16384;  // channels of a group
constexpr int64_t kMamba2Grid = 64;

// A weight vector of F32 or BF16.
struct Mamba2Weight {
  const void* data = nullptr;
  bool bf16 = false;
};

// Activations (xbc, z, dt, out) are BF16 or F32.
struct Mamba2Problem {
  BatchRows batch;
  int64_t num_sequences = 0;
  bool bf16 = false;
  Mamba2Weight a_log, d, dt_bias, norm;
  const void* xbc = nullptr;
  const void* z = nullptr;
  const void* dt = nullptr;
  void* out = nullptr;
  int64_t xbc_stride = 0;
  int64_t z_stride = 0;
  int64_t dt_stride = 0;
  int64_t out_stride = 0;
  float* state = nullptr;
  float* ring_x = nullptr;
  float* ring_b = nullptr;
  float* ring_g = nullptr;
  float* state_snapshot = nullptr;
  int64_t num_heads = 0;
  int64_t num_groups = 0;
  int64_t head_dim = 0;
  int64_t state_dim = 0;
  float norm_eps = 0.0f;
};

#define LOCKSTEP_DECLARE_MAMBA2(isa)                                              \
  namespace isa {                                                                 \
  /* All rows of one sequence for one group and its heads. */                     \
  void Mamba2Unit(const Mamba2Problem& problem, int64_t sequence, int64_t group); \
  }
LOCKSTEP_DECLARE_MAMBA2(generic)
LOCKSTEP_DECLARE_MAMBA2(avx2)
LOCKSTEP_DECLARE_MAMBA2(avx512)
#undef LOCKSTEP_DECLARE_MAMBA2

}  // namespace lockstep
