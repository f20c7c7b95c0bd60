// Launchers of the elementwise operations on CUDA. Pointers are device memory, strides in elements.
#pragma once

#include <cstdint>

#include "kernels/runtime/launch.h"

namespace lockstep {

struct AddResidualProblem {
  void* residual = nullptr;  // [rows, dim] F32 or BF16
  const float* delta = nullptr;
  int64_t rows = 0;
  int64_t dim = 0;
  int64_t residual_stride = 0;
  int64_t delta_stride = 0;
  bool bf16 = false;
};

struct SwiGluProblem {
  const float* gate = nullptr;
  const float* up = nullptr;
  void* out = nullptr;  // [rows, dim] F32 or BF16
  int64_t rows = 0;
  int64_t dim = 0;
  int64_t gate_stride = 0;
  int64_t up_stride = 0;
  int64_t out_stride = 0;
  bool bf16 = false;
};

struct Relu2Problem {
  const float* x = nullptr;
  void* out = nullptr;  // [rows, dim] F32 or BF16
  int64_t rows = 0;
  int64_t dim = 0;
  int64_t x_stride = 0;
  int64_t out_stride = 0;
  bool bf16 = false;
};

LaunchStatus LaunchAddResidual(const AddResidualProblem& problem, void* stream);
LaunchStatus LaunchSwiGlu(const SwiGluProblem& problem, void* stream);

}  // namespace lockstep
