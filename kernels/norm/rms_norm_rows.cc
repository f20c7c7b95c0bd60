// RMS norm rows on the CPU: the order of the sum of squares is that of RmsScale in rms_norm_row.h.
#include "kernels/norm/rms_norm_rows.h"

#include "kernels/base/simd_math.h"

namespace lockstep {
namespace LOCKSTEP_ISA {
namespace {

// x, or the new residual, of row r as floats; its sum of squares.
template <typename Act>
float ReadRow(const RmsNormProblem& p, int64_t r, float* row) {
  Act* residual = static_cast<Act*>(p.residual) + r * p.x_stride;
  const Act* x = p.delta == nullptr ? static_cast<const Act*>(p.x) + r * p.x_stride : residual;
  const float* delta = p.delta == nullptr ? nullptr : p.delta + r * p.delta_stride;
  F32x16 squares = Zero();
  int64_t i = 0;
  for (; i + 16 <= p.dim; i += 16) {
    F32x16 v = LoadAs(x + i);
    if (delta != nullptr) {
      StoreAs(residual + i, Add(v, Load(delta + i)));
      v = LoadAs(residual + i);
    }
    Store(row + i, v);
    squares = Add(squares, Mul(v, v));
  }
  if (i < p.dim) {
    const int64_t begin = i;
    Store(row + begin, Zero());
    for (; i < p.dim; ++i) {
      if (delta != nullptr) residual[i] = FromFloat<Act>(ToFloat(x[i]) + delta[i]);
      row[i] = ToFloat(x[i]);
    }
    const F32x16 v = Load(row + begin);
    squares = Add(squares, Mul(v, v));
  }
  return ReduceAdd(squares);
}

template <typename Act, typename Weight>
void NormRow(const RmsNormProblem& p, int64_t r, float* row) {
  const float sum = ReadRow<Act>(p, r, row);
  const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(p.dim) + p.eps);
  const Weight* weight = static_cast<const Weight*>(p.weight);
  Act* y = static_cast<Act*>(p.y) + r * p.y_stride;
  int64_t i = 0;
  for (; i + 16 <= p.dim; i += 16) {
    const F32x16 w = Add(Set(p.weight_offset), LoadAs(weight + i));
    StoreAs(y + i, Mul(Mul(Load(row + i), Set(scale)), w));
  }
  for (; i < p.dim; ++i) {
    y[i] = FromFloat<Act>(row[i] * scale * (p.weight_offset + ToFloat(weight[i])));
  }
}

}  // namespace

void RmsNormRows(const RmsNormProblem& p, int64_t begin, int64_t end, float* row) {
  auto* run = p.bf16 ? (p.weight_bf16 ? NormRow<BF16, BF16> : NormRow<BF16, float>)
                     : (p.weight_bf16 ? NormRow<float, BF16> : NormRow<float, float>);
  for (int64_t r = begin; r < end; ++r) run(p, r, row);
}

}  // namespace LOCKSTEP_ISA
}  // namespace lockstep
