// What CellStateKernel needs of the keys, queries and gates of a grid cell: norms, Gram
// coefficients, cumulative gates; and the rings. Rows of the cell that a sequence is in when the
// step starts go to the rings at once, next to those that were there; rows of later cells take
// places that CellStateKernel still reads, so that RingKernel writes them at the end.
#include "kernels/delta_net/delta_net_device.cuh"

namespace lockstep {
namespace {

// A grid cell of a sequence with several rows.
struct Cell {
  int b;
  int cell;
};

// Number `index` of all those cells, by a whole warp; b < 0: there are fewer.
__device__ Cell FindCell(const DeltaNetProblem& p, int index) {
  const int lane = threadIdx.x & 31;
  int base = 0;
  for (int first_b = 0; first_b < p.num_sequences; first_b += 32) {
    const int b = first_b + lane;
    int cells = 0, first_cell = 0;
    if (b < p.num_sequences) {
      const SequenceRows s(p, b);
      first_cell = s.first_cell();
      if (s.rows > 1) cells = s.last_cell() - first_cell + 1;
    }
    int sum = cells;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kFullMask, sum, step);
      if (lane >= step) sum += other;
    }
    const int begin = base + sum - cells;
    const unsigned hits = __ballot_sync(kFullMask, index >= begin && index < begin + cells);
    if (hits != 0) {
      const int from = __ffs(static_cast<int>(hits)) - 1;
      return {first_b + from, __shfl_sync(kFullMask, first_cell + index - begin, from)};
    }
    base += __shfl_sync(kFullMask, sum, 31);
  }
  return {-1, 0};
}

template <typename Act>
__global__ void __launch_bounds__(kThreads) CellGramKernel(DeltaNetProblem p) {
  extern __shared__ __align__(16) float shared[];
  const Cell found = FindCell(p, blockIdx.y);
  if (found.b < 0) return;
  const SequenceRows s(p, found.b);
  const int dim = static_cast<int>(p.k_dim), stride = dim + 4;
  float* k = shared;
  float* q = shared + kRows * stride;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int64_t k_head = blockIdx.x, key_stride = p.num_k_heads * p.k_dim;
  const int cell_begin = found.cell * kRows;
  const int j0 = max(s.start - cell_begin, 0), j1 = min(s.end() - cell_begin, kRows);
  const int64_t t0 = s.begin + cell_begin - s.start;  // row j of the cell is row t0 + j
  const bool to_ring = found.cell == s.first_cell();
  float* ring = p.ring_k + s.slot * kRows * key_stride + k_head * dim;
  const float factor = QueryFactor(dim);
  const int lane8 = thread % 8;
#pragma unroll
  for (int u = 0; u < kRows / 32; ++u) {
    const int j = thread / 8 + 32 * u;
    const int64_t t = t0 + j;
    const bool is_new = j >= j0 && j < j1;
    // Whole warps take part in the norms; rows that are not of the step normalize row t0 + j0.
    const Act* q_raw = As<Act>(p.qkv) + (is_new ? t : t0 + j0) * p.qkv_stride + k_head * dim;
    const Act* k_raw = q_raw + key_stride;
    const float k_scale = L2Scale(k_raw, dim), q_scale = L2Scale(q_raw, dim);
    if (is_new && lane8 == 0) {
      *reinterpret_cast<float2*>(p.scales + (t * p.num_k_heads + k_head) * 2) =
          make_float2(k_scale, q_scale);
    }
#pragma unroll 4
    for (int i = 4 * lane8; i < dim; i += 32) {
      float4 key = make_float4(0.0f, 0.0f, 0.0f, 0.0f), query = key;
      if (is_new) {
        key = Scale4(Load4(k_raw + i), k_scale);
        query = Scale4(Scale4(Load4(q_raw + i), q_scale), factor);
        if (to_ring) *reinterpret_cast<float4*>(ring + j * key_stride + i) = key;
      } else if (j < j0) {
        key = Load4(ring + j * key_stride + i);
      }
      *reinterpret_cast<float4*>(k + j * stride + i) = key;
      *reinterpret_cast<float4*>(q + j * stride + i) = query;
    }
  }
  const int64_t ratio = p.num_v_heads / p.num_k_heads;
  for (int64_t r = warp; r < ratio; r += kThreads / 32) {
    const int64_t h = k_head * ratio + r;
    float* gates = p.ring_g + s.slot * kRows * p.num_v_heads + h;
    float g[2], own[2] = {};
    for (int half = 0; half < 2; ++half) {
      const int j = lane + 32 * half;
      g[half] = j >= j0 && j < j1 ? GateOf<Act>(p, t0 + j, h) : 0.0f;
    }
    float sum = j0 == 0 ? 0.0f : gates[(j0 - 1) * p.num_v_heads];
    for (int j = j0; j < j1; ++j) {
      const float next = __shfl_sync(kFullMask, j < 32 ? g[0] : g[1], j % 32);
      sum = j == 0 ? next : __fadd_rn(sum, next);
      if (j == lane) own[0] = sum;
      if (j == lane + 32) own[1] = sum;
    }
    for (int half = 0; half < 2; ++half) {
      const int j = lane + 32 * half;
      if (j < j0 || j >= j1) continue;
      if (to_ring) gates[j * p.num_v_heads] = own[half];
      *reinterpret_cast<float2*>(p.gates + ((t0 + j) * p.num_v_heads + h) * 2) =
          make_float2(own[half], BetaOf<Act>(p, t0 + j, h));
    }
  }
  __syncthreads();
  // Tiles of 16 x 16 on and below the diagonal; tile (a, b) has rows j = 16 a + thread / 16.
  constexpr int kTiles = 4, kDots = kTiles * (kTiles + 1) / 2;
  const float* rows_k = k + thread / 16 * stride;
  const float* rows_q = q + thread / 16 * stride;
  const float* columns = k + thread % 16 * stride;
  float dots[2 * kDots];
  WholeDots<2 * kDots>(
      dim,
      [&](int i, float(&sums)[2 * kDots]) {
        float4 column[kTiles];
#pragma unroll
        for (int b = 0; b < kTiles; ++b) column[b] = Load4(columns + 16 * b * stride + i);
#pragma unroll
        for (int a = 0; a < kTiles; ++a) {
          const float4 row_k = Load4(rows_k + 16 * a * stride + i);
          const float4 row_q = Load4(rows_q + 16 * a * stride + i);
#pragma unroll
          for (int b = 0; b <= a; ++b) {
            const int d = a * (a + 1) / 2 + b;
            sums[d] = Dot4(column[b], row_k, sums[d]);
            sums[kDots + d] = Dot4(column[b], row_q, sums[kDots + d]);
          }
        }
      },
      dots);
#pragma unroll
  for (int a = 0; a < kTiles; ++a) {
    const int j = 16 * a + thread / 16;
    float* grams = p.grams + ((t0 + j) * p.num_k_heads + k_head) * 2 * kRows;
#pragma unroll
    for (int b = 0; b <= a; ++b) {
      const int i = 16 * b + thread % 16, d = a * (a + 1) / 2 + b;
      if (j < j0 || j >= j1 || i > j) continue;
      grams[i] = dots[d];
      grams[kRows + i] = dots[kDots + d];
    }
  }
}

// The open cell's keys and gates of sequences that have left the cell they started the step in.
template <typename Act>
__global__ void __launch_bounds__(kThreads) RingKernel(DeltaNetProblem p) {
  const SequenceRows s(p, blockIdx.y);
  const int j = blockIdx.x;
  if (s.rows <= 1 || s.last_cell() == s.first_cell() || j >= s.end() % kRows) return;
  const int64_t t = s.begin + s.rows - s.end() % kRows + j;
  const int64_t key_stride = p.num_k_heads * p.k_dim;
  const Act* k_raw = As<Act>(p.qkv) + t * p.qkv_stride + key_stride;
  float* ring = p.ring_k + (s.slot * kRows + j) * key_stride;
  for (int64_t i = threadIdx.x; i < key_stride; i += kThreads) {
    ring[i] = __fmul_rn(ToFloat(k_raw[i]), p.scales[(t * p.num_k_heads + i / p.k_dim) * 2]);
  }
  float* gates = p.ring_g + (s.slot * kRows + j) * p.num_v_heads;
  for (int64_t h = threadIdx.x; h < p.num_v_heads; h += kThreads) {
    gates[h] = p.gates[(t * p.num_v_heads + h) * 2];
  }
}

template <typename Act>
LaunchStatus Grams(const DeltaNetProblem& p, cudaStream_t stream) {
  const int bytes = static_cast<int>(2 * kRows * (p.k_dim + 4) * sizeof(float));
  const cudaError_t error =
      cudaFuncSetAttribute(CellGramKernel<Act>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return static_cast<LaunchStatus>(error);
  // n rows lie in at most (n + 126) / 64 cells.
  const int64_t cells = p.num_tokens / kRows + 2 * p.num_sequences;
  if (cells > 65535) return static_cast<LaunchStatus>(cudaErrorInvalidValue);
  const dim3 grid(static_cast<unsigned>(p.num_k_heads), static_cast<unsigned>(cells));
  CellGramKernel<Act><<<grid, kThreads, bytes, stream>>>(p);
  return static_cast<LaunchStatus>(cudaGetLastError());
}

}  // namespace

LaunchStatus LaunchCellGrams(const DeltaNetProblem& p, cudaStream_t stream) {
  return p.bf16 ? Grams<BF16>(p, stream) : Grams<float>(p, stream);
}

LaunchStatus LaunchRings(const DeltaNetProblem& p, cudaStream_t stream) {
  const dim3 grid(kRows, static_cast<unsigned>(p.num_sequences));
  if (p.bf16) {
    RingKernel<BF16><<<grid, kThreads, 0, stream>>>(p);
  } else {
    RingKernel<float><<<grid, kThreads, 0, stream>>>(p);
  }
  return static_cast<LaunchStatus>(cudaGetLastError());
}

}  // namespace lockstep
