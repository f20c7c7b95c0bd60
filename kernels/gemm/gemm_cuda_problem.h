// The arguments of the CUDA arm of Gemm from its operands: for tests and benchmarks that choose the
// tile themselves.
#pragma once

#include "kernels/base/tensor_view.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_launch.h"

namespace lockstep {

// `out` of rank 3: the sums of the virtual shards are kept apart. Operands as Gemm checks them.
GemmCudaProblem MakeGemmCudaProblem(const GemmWeight& weight, const ConstTensorView& x,
                                    const ConstTensorView* act_scales, const TensorView& out);

inline GemmShape ShapeOf(const GemmCudaProblem& p) {
  return {p.format, p.n, p.m, p.leaves, p.leaf_k / 16};
}

}  // namespace lockstep
