// The vector loops of the attention's CPU arm, one set of functions per instruction set. Plain
// structs of pointers; the host entries check them.
#pragma once

#include <cstdint>

namespace lockstep {

constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kKeyBlock = 64;  // positions per cache block and per step of the online softmax

// Activations are BF16 or F32, cached keys and values likewise.
struct AttentionProblem {
  const int32_t* row_offsets = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* block_table = nullptr;
  int64_t num_sequences = 0;
  int64_t block_table_stride = 0;
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
};

#define LOCKSTEP_DECLARE_ATTENTION(isa)                                            \
  namespace isa {                                                                  \
  /* The query heads of one kv head in one row, which belongs to one sequence. */  \
  void AttentionUnit(const AttentionProblem& problem, int64_t sequence, int64_t t, \
                     int64_t kv_head);                                             \
  }
LOCKSTEP_DECLARE_ATTENTION(generic)
LOCKSTEP_DECLARE_ATTENTION(avx2)
LOCKSTEP_DECLARE_ATTENTION(avx512)
#undef LOCKSTEP_DECLARE_ATTENTION

}  // namespace lockstep
