// The vector loop of the causal convolution's CPU arm, one function per instruction set. Plain
// structs of pointers; the host entry checks them.
#pragma once

#include <cstdint>

#include "kernels/batch/batch_rows.h"

namespace lockstep {

constexpr int64_t kMaxConvWidth = 8;
constexpr int64_t kConvChannels = 64;  // channels of one unit of work

// Activations (x, y, conv, conv_snapshot) are BF16 or F32, weight and bias likewise.
struct ConvProblem {
  BatchRows batch;
  int64_t num_sequences = 0;
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

#define LOCKSTEP_DECLARE_CAUSAL_CONV(isa)                                                      \
  namespace isa {                                                                              \
  /* All rows of one sequence, channels [begin, begin + count) with count <= kConvChannels. */ \
  void ConvUnit(const ConvProblem& problem, int64_t sequence, int64_t begin, int64_t count);   \
  }
LOCKSTEP_DECLARE_CAUSAL_CONV(generic)
LOCKSTEP_DECLARE_CAUSAL_CONV(avx2)
LOCKSTEP_DECLARE_CAUSAL_CONV(avx512)
#undef LOCKSTEP_DECLARE_CAUSAL_CONV

}  // namespace lockstep
