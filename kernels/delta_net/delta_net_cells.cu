// Sequences of several rows of the gated delta net, cell by cell: S k and S q of the rows, forward
// substitution, output norm and gate, and at the grid point the new state. A block has a slice of
// a head's values; the blocks of a head are a cluster, because the output norm spans them.
#include "kernels/delta_net/delta_net_device.cuh"

namespace lockstep {
namespace {

namespace cg = cooperative_groups;

// Shared memory of CellStateKernel, in floats.
struct CellShared {
  int stride;   // of rows of Dk elements
  int state;    // [kSlice][stride]
  int keys;     // [kRows][stride]
  int queries;  // [kRows][stride], later coefficients 2 x [kRows][kRows + 1]
  int d;        // [kRows][kSlice]
  int x;        // [kRows][kSlice + 1]
  int o;        // [kRows][kSlice + 1]
  int gates;    // 3 x [kRows]
  int squares;  // 2 x [kMaxSlices][kRows]
  int size;

  __host__ __device__ explicit CellShared(int dim) {
    stride = dim + 4;
    const int coefficients = 2 * kRows * (kRows + 1), rows = kRows * stride;
    state = 0;
    keys = state + kSlice * stride;
    queries = keys + rows;
    d = queries + (rows > coefficients ? rows : coefficients);
    x = d + kRows * kSlice;
    o = x + kRows * (kSlice + 1);
    gates = o + kRows * (kSlice + 1);
    squares = gates + 3 * kRows;
    size = squares + 2 * kMaxSlices * kRows;
  }
};

// A sequence of several rows, cell by cell; a block has kSlice values.
template <typename Act>
__global__ void __launch_bounds__(kThreads, 2) CellStateKernel(const DeltaNetProblem p) {
  extern __shared__ __align__(16) float shared[];
  const SequenceRows s(p, blockIdx.z);
  if (s.rows <= 1) return;
  cg::cluster_group cluster = cg::this_cluster();
  cluster.sync();  // every block has begun
  const int64_t h = blockIdx.y;
  const int64_t k_head = h / (p.num_v_heads / p.num_k_heads);
  const int dim = static_cast<int>(p.k_dim), v_dim = static_cast<int>(p.v_dim);
  const int v0 = blockIdx.x * kSlice, values = min(kSlice, v_dim - v0);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const CellShared at(dim);
  float* state = shared + at.state;
  float* keys = shared + at.keys;
  float* queries = shared + at.queries;
  float* ck = queries;  // row r at r * kCoefficients
  float* cq = ck + kRows * (kRows + 1);
  constexpr int kCoefficients = kRows + 1, kValues = kSlice + 1;
  float* d = shared + at.d;
  float* x = shared + at.x;
  float* o = shared + at.o;
  float* gates = shared + at.gates;
  float* betas = gates + kRows;
  float* from_grid = betas + kRows;
  float* squares = shared + at.squares;

  const int64_t key_stride = p.num_k_heads * p.k_dim, d_stride = p.num_v_heads * p.v_dim;
  const float* ring_k = p.ring_k + s.slot * kRows * key_stride + k_head * dim;
  float* ring_d = p.ring_d + s.slot * kRows * d_stride + h * v_dim + v0;
  float* slot_state = p.state + ((s.slot * p.num_v_heads + h) * v_dim + v0) * dim;
  const float factor = QueryFactor(dim);
  const int columns = dim / 4;
  for (int i = thread; i < kSlice * columns; i += kThreads) {
    const int row = i / columns, k = i % columns * 4;
    *reinterpret_cast<float4*>(state + row * at.stride + k) =
        s.start == 0 || row >= values ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                                      : Load4(slot_state + row * dim + k);
  }
  bool changed = s.start == 0;
  const float norm_weight =
      lane < values ? ReadScalar(p.norm_weight, p.norm_bf16, v0 + lane) : 0.0f;

  for (int cell = s.first_cell(); cell <= s.last_cell(); ++cell) {
    const int cell_begin = cell * kRows;
    const int j0 = max(s.start - cell_begin, 0), j1 = min(s.end() - cell_begin, kRows);
    const int64_t t0 = s.begin + cell_begin - s.start;  // row j of the cell is row t0 + j
    __syncthreads();
    // Loads of several items go out before their results are stored.
    constexpr int kAhead = 4;
    for (int first = thread; first < kRows * columns; first += kAhead * kThreads) {
      float4 key[kAhead], query[kAhead];
      float2 scale[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int i = first + u * kThreads, j = i / columns, k = i % columns * 4;
        key[u] = query[u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        scale[u] = make_float2(1.0f, 1.0f);
        if (j < j0) {
          key[u] = Load4(ring_k + j * key_stride + k);
        } else if (j < j1) {
          const Act* q_raw = As<Act>(p.qkv) + (t0 + j) * p.qkv_stride + k_head * dim + k;
          scale[u] =
              *reinterpret_cast<const float2*>(p.scales + ((t0 + j) * p.num_k_heads + k_head) * 2);
          key[u] = Load4(q_raw + key_stride);
          query[u] = Load4(q_raw);
        }
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int i = first + u * kThreads, j = i / columns, k = i % columns * 4;
        if (j >= kRows) break;
        *reinterpret_cast<float4*>(keys + j * at.stride + k) = Scale4(key[u], scale[u].x);
        *reinterpret_cast<float4*>(queries + j * at.stride + k) =
            Scale4(Scale4(query[u], scale[u].y), factor);
      }
    }
    for (int i = thread; i < j0 * kSlice; i += kThreads) {
      const int j = i / kSlice, v = i % kSlice;
      d[i] = v < values ? ring_d[j * d_stride + v] : 0.0f;
    }
    if (thread < kRows) {
      float gate = 0.0f, beta = 0.0f;
      if (thread < j0) {
        gate = p.ring_g[(s.slot * kRows + thread) * p.num_v_heads + h];
      } else if (thread < j1) {
        gate = p.gates[((t0 + thread) * p.num_v_heads + h) * 2];
        beta = p.gates[((t0 + thread) * p.num_v_heads + h) * 2 + 1];
      }
      gates[thread] = gate;
      betas[thread] = beta;
      from_grid[thread] = Exp(gate);
    }
    __syncthreads();

    // S k_j and S q_j: thread (r, c) has rows r + 16 a and values c + 16 b.
    {
      constexpr int kA = kRows / 16, kB = kSlice / 16, kDots = kA * kB;
      const int r = thread / 16, c = thread % 16;
      float values_of[kA][kB];
#pragma unroll
      for (int a = 0; a < kA; ++a) {
        const int j = r + 16 * a;
        const Act* row = As<Act>(p.qkv) + (t0 + j) * p.qkv_stride + 2 * key_stride + h * v_dim + v0;
#pragma unroll
        for (int b = 0; b < kB; ++b) {
          const int v = c + 16 * b;
          values_of[a][b] = j >= j0 && j < j1 && v < values ? ToFloat(row[v]) : 0.0f;
        }
      }
      float dots[2 * kDots];
      WholeDots<2 * kDots>(
          dim,
          [&](int i, float(&sums)[2 * kDots]) {
            float4 row[kB];
#pragma unroll
            for (int b = 0; b < kB; ++b) row[b] = Load4(state + (c + 16 * b) * at.stride + i);
#pragma unroll
            for (int a = 0; a < kA; ++a) {
              const float4 key = Load4(keys + (r + 16 * a) * at.stride + i);
              const float4 query = Load4(queries + (r + 16 * a) * at.stride + i);
#pragma unroll
              for (int b = 0; b < kB; ++b) {
                sums[a * kB + b] = Dot4(row[b], key, sums[a * kB + b]);
                sums[kDots + a * kB + b] = Dot4(row[b], query, sums[kDots + a * kB + b]);
              }
            }
          },
          dots);
#pragma unroll
      for (int a = 0; a < kA; ++a) {
        const int j = r + 16 * a;
        if (j < j0 || j >= j1) continue;
#pragma unroll
        for (int b = 0; b < kB; ++b) {
          const int v = c + 16 * b;
          const float old = __fmul_rn(from_grid[j], dots[a * kB + b]);
          x[j * kValues + v] = v < values ? __fsub_rn(values_of[a][b], old) : 0.0f;
          o[j * kValues + v] = __fmul_rn(from_grid[j], dots[kDots + a * kB + b]);
        }
      }
    }
    __syncthreads();
    for (int first = warp; first < j1; first += kAhead * kThreads / 32) {
      float kk[kAhead][2], kq[kAhead][2];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int j = first + u * kThreads / 32;
        const float* grams = p.grams + ((t0 + j) * p.num_k_heads + k_head) * 2 * kRows;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = lane + 32 * half;
          const bool wanted = j >= j0 && j < j1 && i <= j;
          kk[u][half] = wanted ? grams[i] : 0.0f;
          kq[u][half] = wanted ? grams[kRows + i] : 0.0f;
        }
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int j = first + u * kThreads / 32;
        if (j < j0 || j >= j1) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = lane + 32 * half;
          if (i > j) continue;
          const float decay = Exp(__fsub_rn(gates[j], gates[i]));
          ck[j * kCoefficients + i] = __fmul_rn(decay, kk[u][half]);
          cq[j * kCoefficients + i] = __fmul_rn(decay, kq[u][half]);
        }
      }
    }
    __syncthreads();

    // A warp has four values, its lanes the rows lane and lane + 32.
    {
      const int v = 4 * warp;
      float sum_k[2][4] = {}, sum_q[2][4] = {}, own[2][4], beta[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = lane + 32 * half;
        beta[half] = betas[j];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          own[half][u] = j >= j0 && j < j1 ? x[j * kValues + v + u] : 0.0f;
        }
      }
      // Coefficients of row i for this lane's rows; those of rows before i are of no meaning.
      struct Column {
        float k[2], q[2];
      };
      const auto column = [&](int i) {
        Column at_i;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          at_i.k[half] = ck[(lane + 32 * half) * kCoefficients + i];
          at_i.q[half] = cq[(lane + 32 * half) * kCoefficients + i];
        }
        return at_i;
      };
      const auto add = [&](int i, const Column& at_i, const float(&d_i)[4], int half) {
        const int j = lane + 32 * half;
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          if (j > i) sum_k[half][u] = __fmaf_rn(at_i.k[half], d_i[u], sum_k[half][u]);
          if (j >= i) sum_q[half][u] = __fmaf_rn(at_i.q[half], d_i[u], sum_q[half][u]);
        }
      };
      Column next = column(0);
      for (int i = 0; i < j0; ++i) {
        const Column at_i = next;
        next = column(i + 1);
        const float4 row = Load4(d + i * kSlice + v);
        const float d_i[4] = {row.x, row.y, row.z, row.w};
        add(i, at_i, d_i, 0);
        add(i, at_i, d_i, 1);
      }
      const auto solve = [&](int i, int half) {
        const Column at_i = next;
        next = column(min(i + 1, kRows - 1));
        float d_i[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          const float mine = __fmul_rn(beta[half], __fsub_rn(own[half][u], sum_k[half][u]));
          d_i[u] = __shfl_sync(kFullMask, mine, i % 32);
        }
        if (lane == 0) {
          *reinterpret_cast<float4*>(d + i * kSlice + v) =
              make_float4(d_i[0], d_i[1], d_i[2], d_i[3]);
        }
        if (half == 0) add(i, at_i, d_i, 0);
        add(i, at_i, d_i, 1);
      };
#pragma unroll 2
      for (int i = j0; i < min(j1, 32); ++i) solve(i, 0);
#pragma unroll 2
      for (int i = max(j0, 32); i < j1; ++i) solve(i, 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = lane + 32 * half;
        if (j < j0 || j >= j1) continue;
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          o[j * kValues + v + u] = __fadd_rn(o[j * kValues + v + u], sum_q[half][u]);
        }
      }
    }
    __syncthreads();

    float* cell_squares = squares + cell % 2 * kMaxSlices * kRows;
    constexpr int kWarpRows = kRows / (kThreads / 32);
    float z[kWarpRows];
#pragma unroll
    for (int u = 0; u < kWarpRows; ++u) {
      const int j = warp + u * (kThreads / 32);
      z[u] = j >= j0 && j < j1 && lane < values
                 ? ToFloat(As<Act>(p.z)[(t0 + j) * p.z_stride + h * v_dim + v0 + lane])
                 : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < kWarpRows; ++u) {
      const int j = warp + u * (kThreads / 32);
      const float o_v = j >= j0 && j < j1 && lane < values ? o[j * kValues + lane] : 0.0f;
      const float sum = WarpSum(__fmul_rn(o_v, o_v));
      if (lane == 0) Broadcast(cell_squares + blockIdx.x * kRows + j, sum);
    }
    cluster.sync();
#pragma unroll
    for (int u = 0; u < kWarpRows; ++u) {
      const int j = warp + u * (kThreads / 32);
      if (j < j0 || j >= j1 || lane >= values) continue;
      const float total = AddSlices(cell_squares + j, kRows, static_cast<int>(gridDim.x));
      StoreOutput<Act>(p, t0 + j, h, v0 + lane, o[j * kValues + lane], total, norm_weight, z[u]);
    }

    if (j1 < kRows) {
      for (int i = j0 * kSlice + thread; i < j1 * kSlice; i += kThreads) {
        if (i % kSlice < values) ring_d[i / kSlice * d_stride + i % kSlice] = d[i];
      }
      continue;
    }
    changed = true;
    for (int i = thread; i < kRows * kSlice; i += kThreads) {
      d[i] = __fmul_rn(Exp(__fsub_rn(gates[kRows - 1], gates[i / kSlice])), d[i]);
    }
    __syncthreads();
    Fold(
        kThreads, dim, values, from_grid[kRows - 1], state, at.stride,
        [&](int i, int k) { return Load4(keys + i * at.stride + k); }, d, kSlice,
        [&](int row, int k, float4 sum) {
          *reinterpret_cast<float4*>(state + row * at.stride + k) = sum;
          ForSnapshots(p.batch, blockIdx.z, cell_begin + kRows, [&](int64_t snapshot) {
            float* to = p.state_snapshot + ((snapshot * p.num_v_heads + h) * v_dim + v0) * dim;
            *reinterpret_cast<float4*>(to + row * dim + k) = sum;
          });
        });
  }
  __syncthreads();
  if (changed) {
    for (int i = thread; i < values * columns; i += kThreads) {
      const int row = i / columns, k = i % columns * 4;
      *reinterpret_cast<float4*>(slot_state + row * dim + k) = Load4(state + row * at.stride + k);
    }
  }
  // The other blocks may still write into this one's shared memory.
  cluster.sync();
}

template <typename Act>
LaunchStatus Cells(const DeltaNetProblem& p, cudaStream_t stream) {
  const unsigned slices = static_cast<unsigned>((p.v_dim + kSlice - 1) / kSlice);
  const dim3 grid(slices, static_cast<unsigned>(p.num_v_heads),
                  static_cast<unsigned>(p.num_sequences));
  const size_t bytes = CellShared(static_cast<int>(p.k_dim)).size * sizeof(float);
  return static_cast<LaunchStatus>(
      LaunchClusters(CellStateKernel<Act>, false, grid, bytes, stream, p));
}

}  // namespace

LaunchStatus LaunchCells(const DeltaNetProblem& p, cudaStream_t stream) {
  return p.bf16 ? Cells<BF16>(p, stream) : Cells<float>(p, stream);
}

}  // namespace lockstep
