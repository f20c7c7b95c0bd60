// Launchers of the RMS norm on CUDA. Pointers are device memory.
#pragma once

#include <cstdint>

#include "kernels/runtime/launch.h"

namespace lockstep {

// Everything that both functions of rms_norm.h need. `bf16` tells the dtype of x, residual and y,
// `weight_bf16` that of the weight; strides are in elements.
struct RmsNormProblem {
  const void* x = nullptr;       // [rows, dim]; unused when delta is set
  void* residual = nullptr;      // [rows, dim] with delta: read and written
  const float* delta = nullptr;  // [rows, dim] or null
  const void* weight = nullptr;
  void* y = nullptr;
  int64_t rows = 0;
  int64_t dim = 0;
  int64_t x_stride = 0;  // of x, or of residual with delta
  int64_t delta_stride = 0;
  int64_t y_stride = 0;
  bool bf16 = false;
  bool weight_bf16 = false;
  float eps = 0.0f;
  float weight_offset = 0.0f;
};

// One block per row. The sum of squares has 256 lanes (index mod 256, ascending), joined by one
// tree, for every row count and width.
LaunchStatus LaunchRmsNorm(const RmsNormProblem& problem, void* stream);

}  // namespace lockstep
