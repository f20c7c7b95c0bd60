// The causal convolution as a plain struct of pointers, and its launcher on CUDA. The host entry
// checks it; for CUDA all pointers are device memory.
#pragma once

#include <cstdint>

#include "kernels/batch/batch_rows.h"
#include "kernels/runtime/launch.h"

namespace lockstep {

constexpr int64_t kMaxConvWidth = 8;

// Activations (x, y, conv, conv_snapshot) are BF16 or F32, weight and bias likewise.
struct ConvProblem {
  BatchRows batch;
  int64_t num_sequences = 0;
  int64_t num_tokens = 0;
  bool bf16 = false;
  bool weight_bf16 = false;
  bool bias_bf16 = false;
  const void* x = nullptr;  // [T, channels]
  int64_t x_stride = 0;
  const void* weight = nullptr;  // [channels, width]
  const void* bias = nullptr;    // [channels] or null
  void* y = nullptr;             // [T, channels]
  int64_t y_stride = 0;
  void* conv = nullptr;  // [slots, width - 1, channels]
  void* conv_snapshot = nullptr;
  int64_t channels = 0;
  int64_t width = 0;
};

// Two kernels: the first width - 1 rows of every sequence with its states and snapshots, and the
// rows that see no state (skipped when there are none: one row per sequence). Every output element
// is the same chain of fused multiply-adds, taps ascending.
LaunchStatus LaunchCausalConv(const ConvProblem& problem, void* stream);

}  // namespace lockstep
