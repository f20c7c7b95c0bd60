// Launcher of activation quantization on CUDA. Pointers are device memory, strides in elements.
#pragma once

#include <cstdint>

#include "kernels/runtime/launch.h"

namespace lockstep {

// `scale_rule` is that of QuantizeRowArgs.
struct QuantizeProblem {
  const void* x = nullptr;   // [rows, k]
  uint8_t* codes = nullptr;  // [rows, k]
  float* scales = nullptr;   // [rows, groups of a row]
  int64_t rows = 0;
  int64_t k = 0;
  int64_t x_stride = 0;
  int64_t codes_stride = 0;
  int64_t scales_stride = 0;
  int64_t shard_size = 0;
  int64_t group = 0;
  int scale_rule = 0;
  float static_scale = 0.0f;
  bool x_bf16 = false;  // else F32
};

LaunchStatus LaunchQuantize(const QuantizeProblem& problem, void* stream);

}  // namespace lockstep
