// The vector loops of the gated delta net's CPU arm, one set of functions per instruction set.
// Plain structs of pointers; the host entries check them.
#pragma once

#include <cstdint>

#include "kernels/batch/batch_rows.h"

namespace lockstep {

constexpr int64_t kMaxDeltaNetDim = 256;  // of keys and values
constexpr int64_t kDeltaNetGrid = 64;

struct DeltaNetProblem {
  BatchRows batch;
  bool bf16 = false;
  bool a_log_bf16 = false;
  bool dt_bias_bf16 = false;
  bool norm_bf16 = false;
  bool sigmoid_gate = false;
  const void* qkv = nullptr;
  const void* z = nullptr;
  const void* b = nullptr;
  const void* a = nullptr;
  const void* a_log = nullptr;
  const void* dt_bias = nullptr;
  const void* norm_weight = nullptr;
  void* out = nullptr;
  int64_t qkv_stride = 0;
  int64_t z_stride = 0;
  int64_t b_stride = 0;
  int64_t a_stride = 0;
  int64_t out_stride = 0;
  float* state = nullptr;
  float* ring_k = nullptr;
  float* ring_d = nullptr;
  float* ring_g = nullptr;
  float* state_snapshot = nullptr;
  int64_t num_k_heads = 0;
  int64_t num_v_heads = 0;
  int64_t k_dim = 0;
  int64_t v_dim = 0;
  float norm_eps = 0.0f;
};

#define LOCKSTEP_DECLARE_DELTA_NET(isa)                                                \
  namespace isa {                                                                      \
  /* All rows of one sequence for one key head and its value heads. */                 \
  void DeltaNetUnit(const DeltaNetProblem& problem, int64_t sequence, int64_t k_head); \
  }
LOCKSTEP_DECLARE_DELTA_NET(generic)
LOCKSTEP_DECLARE_DELTA_NET(avx2)
LOCKSTEP_DECLARE_DELTA_NET(avx512)
#undef LOCKSTEP_DECLARE_DELTA_NET

}  // namespace lockstep
