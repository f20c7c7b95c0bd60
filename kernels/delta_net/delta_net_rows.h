// The vector loops of the gated delta net's CPU arm, one set of functions per instruction set.
// Plain structs of pointers; the host entries check them.
#pragma once

#include <cstdint>

namespace lockstep {

constexpr int64_t kMaxConvWidth = 8;
constexpr int64_t kConvChannels = 64;     // channels of one unit of work
constexpr int64_t kMaxDeltaNetDim = 256;  // of keys and values
constexpr int64_t kDeltaNetGrid = 64;

// The batch as these loops read it: see ForwardBatch.
struct RowsOfBatch {
  const int32_t* row_offsets = nullptr;
  const int32_t* slots = nullptr;
  const int32_t* start_positions = nullptr;
  const int32_t* snapshot_sequence = nullptr;
  const int32_t* snapshot_position = nullptr;
  const int32_t* snapshot_slot = nullptr;
  int64_t num_snapshots = 0;
};

// Activations (x, y, conv, conv_snapshot) are BF16 or F32, the weight likewise.
struct ConvProblem {
  RowsOfBatch batch;
  bool bf16 = false;
  bool weight_bf16 = false;
  const void* x = nullptr;  // [T, channels]
  int64_t x_stride = 0;
  const void* weight = nullptr;  // [channels, width]
  void* y = nullptr;             // [T, channels]
  int64_t y_stride = 0;
  void* conv = nullptr;  // [slots, width - 1, channels]
  void* conv_snapshot = nullptr;
  int64_t channels = 0;
  int64_t width = 0;
};

struct DeltaNetProblem {
  RowsOfBatch batch;
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

#define LOCKSTEP_DECLARE_DELTA_NET(isa)                                                        \
  namespace isa {                                                                              \
  /* All rows of one sequence, channels [begin, begin + count) with count <= kConvChannels. */ \
  void ConvUnit(const ConvProblem& problem, int64_t sequence, int64_t begin, int64_t count);   \
  /* All rows of one sequence for one key head and its value heads. */                         \
  void DeltaNetUnit(const DeltaNetProblem& problem, int64_t sequence, int64_t k_head);         \
  }
LOCKSTEP_DECLARE_DELTA_NET(generic)
LOCKSTEP_DECLARE_DELTA_NET(avx2)
LOCKSTEP_DECLARE_DELTA_NET(avx512)
#undef LOCKSTEP_DECLARE_DELTA_NET

}  // namespace lockstep
