#include "kernels/pointwise/pointwise_rows.h"

#include "kernels/base/simd_math.h"

namespace lockstep {
namespace LOCKSTEP_ISA {
namespace {

template <typename Act>
void SwiGluRow(const float* gate, const float* up, Act* out, int64_t dim) {
  int64_t i = 0;
  for (; i + 16 <= dim; i += 16) {
    StoreAs(out + i, Mul(SiluOf(Load(gate + i)), Load(up + i)));
  }
  for (; i < dim; ++i) out[i] = FromFloat<Act>(Silu(gate[i]) * up[i]);
}

}  // namespace

void SwiGluRows(const SwiGluProblem& p, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const float* gate = p.gate + r * p.gate_stride;
    const float* up = p.up + r * p.up_stride;
    if (p.bf16) {
      SwiGluRow(gate, up, static_cast<BF16*>(p.out) + r * p.out_stride, p.dim);
    } else {
      SwiGluRow(gate, up, static_cast<float*>(p.out) + r * p.out_stride, p.dim);
    }
  }
}

}  // namespace LOCKSTEP_ISA
}  // namespace lockstep
