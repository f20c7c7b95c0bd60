// The gated delta net as a plain struct of pointers, and its launcher on CUDA. The host entry
// checks it; for CUDA all pointers are device memory.
#pragma once

#include <cstdint>

#include "kernels/batch/batch_rows.h"
#include "kernels/runtime/launch.h"

namespace lockstep {

constexpr int64_t kMaxDeltaNetDim = 256;  // of keys and values
constexpr int64_t kDeltaNetGrid = 64;

struct DeltaNetProblem {
  BatchRows batch;
  int64_t num_tokens = 0;
  int64_t num_sequences = 0;
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
  // Of the CUDA arm, temporaries of one call:
  float* grams = nullptr;   // [T, Hk, 2, kDeltaNetGrid]: k_i . k_j, then k_i . q_j, of row j
  float* scales = nullptr;  // [T, Hk, 2]: what k_j and q_j are multiplied with
  float* gates = nullptr;   // [T, Hv, 2]: the cumulative gate G_j and beta_j
};

// Why the CUDA arm cannot run the problem, or nullptr.
const char* CannotRunDeltaNetCuda(const DeltaNetProblem& problem);
// Kernels of sequences of one row; and, when there may be others (more tokens than sequences),
// those of their grid cells. Which kernels run is a function of the shapes.
LaunchStatus LaunchDeltaNet(const DeltaNetProblem& problem, void* stream);

}  // namespace lockstep
