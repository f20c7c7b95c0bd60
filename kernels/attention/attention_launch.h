// Attention as plain structs of pointers, and its launchers on CUDA. The host entries check them;
// for CUDA all pointers are device memory.
#pragma once

#include <cstdint>

#include "kernels/runtime/launch.h"

namespace lockstep {

constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kKeyBlock = 64;  // positions per cache block and per step of the online softmax

// Key blocks of one split: the softmax of a split starts afresh, and splits merge in ascending
// order (numerics N5). A contract constant of the tensor core arm.
constexpr int64_t kSplitBlocks = 4;

// Activations are BF16 or F32, cached keys and values likewise.
struct AttentionProblem {
  const int32_t* row_offsets = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* start_positions = nullptr;
  const int32_t* block_table = nullptr;
  int64_t num_tokens = 0;
  int64_t num_sequences = 0;
  int64_t block_table_stride = 0;
  int64_t max_blocks = 0;  // of one sequence
  bool bf16 = false;
  bool cache_bf16 = false;
  bool output_gate = false;
  const void* q = nullptr;  // [T, num_q_heads * head_dim]
  int64_t q_stride = 0;
  const void* q_and_gate = nullptr;
  int64_t q_and_gate_stride = 0;
  const void* keys = nullptr;  // [blocks, num_kv_heads, kKeyBlock, head_dim]
  const void* values = nullptr;
  void* out = nullptr;
  int64_t out_stride = 0;
  int64_t num_q_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  float scale = 0.0f;
  // Of the tensor core arm: what splits of few rows leave for the merge, for this many splits.
  float* partials = nullptr;
  int64_t partial_splits = 0;
};

// What RopeAndCacheWrite needs. Activations are BF16 or F32, the cache likewise.
struct RopeProblem {
  const int32_t* row_offsets = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* block_table = nullptr;
  int64_t num_tokens = 0;
  int64_t num_sequences = 0;
  int64_t block_table_stride = 0;
  bool bf16 = false;
  bool cache_bf16 = false;
  bool q_norm_bf16 = false;
  bool k_norm_bf16 = false;
  bool qk_norm = false;
  const void* q = nullptr;  // [T, ...]: head h at h * q_head_stride
  int64_t q_stride = 0;
  int64_t q_head_stride = 0;
  const void* k = nullptr;
  int64_t k_stride = 0;
  const void* v = nullptr;
  int64_t v_stride = 0;
  const void* q_norm = nullptr;
  const void* k_norm = nullptr;
  const float* inv_freq = nullptr;
  void* q_out = nullptr;
  int64_t q_out_stride = 0;
  void* keys = nullptr;
  void* values = nullptr;
  int64_t num_q_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;
  float norm_eps = 0.0f;
  float norm_weight_offset = 0.0f;
};

LaunchStatus LaunchRope(const RopeProblem& problem, void* stream);

// Why the tensor core arm cannot run the problem, or nullptr.
const char* CannotRunAttentionMma(const AttentionProblem& problem);
// What `partial_splits` should be, and the floats of that many partials: functions of the shapes.
int64_t AttentionPartialSplits(const AttentionProblem& problem);
int64_t AttentionPartialFloats(const AttentionProblem& problem);
// BF16 activations and cache, head_dim 64, 128 or 256.
LaunchStatus LaunchAttentionMma(const AttentionProblem& problem, void* stream);

// Every dtype and head_dim, one block per row and head: the arm of F32 models, not a fast one.
LaunchStatus LaunchAttentionGeneric(const AttentionProblem& problem, void* stream);

}  // namespace lockstep
