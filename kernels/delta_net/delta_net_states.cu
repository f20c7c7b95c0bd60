// The states of the gated delta net: S k and S q of a row, forward substitution over the rows of
// its grid cell, output norm and gate, and at the grid point the new state. A block has a slice of
// a head's values; the blocks of a head are a cluster, because the output norm spans them.
#include <cooperative_groups.h>

#include "kernels/delta_net/delta_net_device.cuh"

namespace lockstep {
namespace {

namespace cg = cooperative_groups;

// Adds the sums of squares of all slices, ascending. sums[slice] lies `stride` floats apart.
__device__ float AddSlices(const float* sums, int stride, int slices) {
  float total = sums[0];
  for (int slice = 1; slice < slices; ++slice) total = __fadd_rn(total, sums[slice * stride]);
  return total;
}

// Writes x to `to` in the shared memory of every block of the cluster.
__device__ void Broadcast(float* to, float x) {
  cg::cluster_group cluster = cg::this_cluster();
  for (unsigned rank = 0; rank < cluster.num_blocks(); ++rank) {
    *cluster.map_shared_rank(to, static_cast<int>(rank)) = x;
  }
}

// A sequence of one row. kPanel: state rows that one group of eight threads holds at once; kChunks:
// groups of four elements that one thread has of a state row.
template <typename Act, int kPanel, int kChunks>
__global__ void __launch_bounds__(kThreads, 2)
    StepStateKernel(const DeltaNetProblem p, int values_per_block) {
  extern __shared__ __align__(16) float shared[];
  const SequenceRows s(p, blockIdx.z);
  if (s.rows != 1) {
    cudaGridDependencySynchronize();
    return;
  }
  cg::cluster_group cluster = cg::this_cluster();
  cluster.barrier_arrive();  // that every block has begun is waited for before Broadcast
  const int64_t h = blockIdx.y, t = s.begin;
  const int64_t k_head = h / (p.num_v_heads / p.num_k_heads);
  const int dim = static_cast<int>(p.k_dim), v_dim = static_cast<int>(p.v_dim);
  const int v0 = blockIdx.x * values_per_block, values = min(values_per_block, v_dim - v0);
  const int j = s.start % kRows;
  const int thread = threadIdx.x, lane = thread % 8, group = thread / 8;
  const bool fresh = s.start == 0;
  float* d = shared;  // [kRows][values_per_block]
  float* state_k = d + kRows * values_per_block;
  float* state_q = state_k + values_per_block;
  float* ck = state_q + values_per_block;  // [kRows]
  float* cq = ck + kRows;
  float* decays = cq + kRows;
  float* squares = decays + kRows;  // [kMaxSlices]

  const int64_t d_stride = p.num_v_heads * p.v_dim;
  float* ring_d = p.ring_d + s.slot * kRows * d_stride + h * v_dim + v0;
  for (int i = thread; i < j * values / 4; i += kThreads) {
    const int row = i / (values / 4), column = i % (values / 4) * 4;
    const uint32_t to =
        static_cast<uint32_t>(__cvta_generic_to_shared(d + row * values_per_block + column));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
                 "l"(ring_d + row * d_stride + column));
  }
  asm volatile("cp.async.commit_group;");

  float* state = p.state + ((s.slot * p.num_v_heads + h) * v_dim + v0) * dim;
  const Act* q_raw = As<Act>(p.qkv) + t * p.qkv_stride + k_head * dim;
  const Act* k_raw = q_raw + p.num_k_heads * dim;
  const float* scales = p.scales + (t * p.num_k_heads + k_head) * 2;
  const float factor = QueryFactor(dim);
  for (int first = 0; first < values; first += 32 * kPanel) {
    float4 x[kPanel][kChunks];
#pragma unroll
    for (int u = 0; u < kPanel; ++u) {
      const int v = first + group + 32 * u;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int i = 4 * lane + 32 * c;
        x[u][c] = v < values && i < dim && !fresh
                      ? __ldcs(reinterpret_cast<const float4*>(state + v * dim + i))
                      : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
    float sum_k[kPanel] = {}, sum_q[kPanel] = {};
    if (first == 0) cudaGridDependencySynchronize();  // what StepGramKernel has written
    const float k_scale = scales[0], q_scale = scales[1];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int i = 4 * lane + 32 * c;
      if (i >= dim) break;
      const float4 k = Scale4(Load4(k_raw + i), k_scale);
      const float4 q = Scale4(Scale4(Load4(q_raw + i), q_scale), factor);
#pragma unroll
      for (int u = 0; u < kPanel; ++u) {
        sum_k[u] = Dot4(x[u][c], k, sum_k[u]);
        sum_q[u] = Dot4(x[u][c], q, sum_q[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < kPanel; ++u) {
      const int v = first + group + 32 * u;
      const float total_k = JoinLanes(sum_k[u]), total_q = JoinLanes(sum_q[u]);
      if (lane == 0 && v < values) {
        state_k[v] = total_k;
        state_q[v] = total_q;
      }
    }
  }
  const float* gates = p.gates + (t * p.num_v_heads + h) * 2;
  const float g_j = gates[0], beta = gates[1];
  if (thread <= j) {
    const float* grams = p.grams + (t * p.num_k_heads + k_head) * 2 * kRows;
    const float g_i = thread == j ? g_j : p.ring_g[(s.slot * kRows + thread) * p.num_v_heads + h];
    const float decay = Exp(__fsub_rn(g_j, g_i));
    decays[thread] = decay;
    ck[thread] = __fmul_rn(decay, grams[thread]);
    cq[thread] = __fmul_rn(decay, grams[kRows + thread]);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();

  const float from_grid = Exp(g_j);
  const int v = thread;
  float o = 0.0f;
  if (v < values) {
    float sum_k = 0.0f, sum_q = 0.0f;
#pragma unroll 8
    for (int i = 0; i < j; ++i) {
      const float d_i = d[i * values_per_block + v];
      sum_k = __fmaf_rn(ck[i], d_i, sum_k);
      sum_q = __fmaf_rn(cq[i], d_i, sum_q);
    }
    const float value =
        ToFloat(As<Act>(p.qkv)[t * p.qkv_stride + 2 * p.num_k_heads * dim + h * v_dim + v0 + v]);
    const float old = __fmul_rn(from_grid, state_k[v]);
    const float d_j = __fmul_rn(beta, __fsub_rn(__fsub_rn(value, old), sum_k));
    sum_q = __fmaf_rn(cq[j], d_j, sum_q);
    o = __fadd_rn(__fmul_rn(from_grid, state_q[v]), sum_q);
    ring_d[j * d_stride + v] = d_j;
    d[j * values_per_block + v] = d_j;
  }
  cluster.barrier_wait();
  if (thread - thread % 32 < values) {
    const float sum = WarpSum(__fmul_rn(o, o));
    if (thread % 32 == 0) Broadcast(squares + (v0 + v) / kSlice, sum);
  }
  cluster.sync();
  if (v < values) {
    StoreOutput<Act>(p, t, h, v0 + v, o, AddSlices(squares, 1, (v_dim + kSlice - 1) / kSlice));
  }

  if (fresh) {
    for (int i = thread; i < values * dim / 4; i += kThreads) {
      reinterpret_cast<float4*>(state)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  if (j != kRows - 1) return;
  for (int i = thread; i < kRows * values; i += kThreads) {
    float* weight = d + i / values * values_per_block + i % values;
    *weight = __fmul_rn(decays[i / values], *weight);
  }
  __syncthreads();
  const int64_t key_stride = p.num_k_heads * p.k_dim;
  const float* keys = p.ring_k + s.slot * kRows * key_stride + k_head * dim;
  Fold(dim, values, from_grid, state, dim, keys, key_stride, d, values_per_block,
       [&](int row, int k, float4 x) {
         *reinterpret_cast<float4*>(state + row * dim + k) = x;
         ForSnapshots(p.batch, blockIdx.z, s.end(), [&](int64_t snapshot) {
           float* to = p.state_snapshot + ((snapshot * p.num_v_heads + h) * v_dim + v0) * dim;
           *reinterpret_cast<float4*>(to + row * dim + k) = x;
         });
       });
}

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

  for (int cell = s.first_cell(); cell <= s.last_cell(); ++cell) {
    const int cell_begin = cell * kRows;
    const int j0 = max(s.start - cell_begin, 0), j1 = min(s.end() - cell_begin, kRows);
    const int64_t t0 = s.begin + cell_begin - s.start;  // row j of the cell is row t0 + j
    __syncthreads();
    for (int i = thread; i < kRows * columns; i += kThreads) {
      const int j = i / columns, k = i % columns * 4;
      float4 key = make_float4(0.0f, 0.0f, 0.0f, 0.0f), query = key;
      if (j < j0) {
        key = Load4(ring_k + j * key_stride + k);
      } else if (j < j1) {
        const Act* q_raw = As<Act>(p.qkv) + (t0 + j) * p.qkv_stride + k_head * dim + k;
        const float2 scale =
            *reinterpret_cast<const float2*>(p.scales + ((t0 + j) * p.num_k_heads + k_head) * 2);
        key = Scale4(Load4(q_raw + key_stride), scale.x);
        query = Scale4(Scale4(Load4(q_raw), scale.y), factor);
      }
      *reinterpret_cast<float4*>(keys + j * at.stride + k) = key;
      *reinterpret_cast<float4*>(queries + j * at.stride + k) = query;
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
        const Act* value =
            As<Act>(p.qkv) + (t0 + j) * p.qkv_stride + 2 * key_stride + h * v_dim + v0;
#pragma unroll
        for (int b = 0; b < kB; ++b) {
          const int v = c + 16 * b;
          const float old = __fmul_rn(from_grid[j], dots[a * kB + b]);
          x[j * kValues + v] = v < values ? __fsub_rn(ToFloat(value[v]), old) : 0.0f;
          o[j * kValues + v] = __fmul_rn(from_grid[j], dots[kDots + a * kB + b]);
        }
      }
    }
    __syncthreads();
    for (int j = j0 + warp; j < j1; j += kThreads / 32) {
      const float* grams = p.grams + ((t0 + j) * p.num_k_heads + k_head) * 2 * kRows;
      for (int i = lane; i <= j; i += 32) {
        const float decay = Exp(__fsub_rn(gates[j], gates[i]));
        ck[j * kCoefficients + i] = __fmul_rn(decay, grams[i]);
        cq[j * kCoefficients + i] = __fmul_rn(decay, grams[kRows + i]);
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
      const auto add = [&](int i, const float(&d_i)[4], int half) {
        const int j = lane + 32 * half;
        if (j < i || j < j0 || j >= j1) return;
        const float k = ck[j * kCoefficients + i], q = cq[j * kCoefficients + i];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          if (j > i) sum_k[half][u] = __fmaf_rn(k, d_i[u], sum_k[half][u]);
          sum_q[half][u] = __fmaf_rn(q, d_i[u], sum_q[half][u]);
        }
      };
      for (int i = 0; i < j0; ++i) {
        const float4 row = Load4(d + i * kSlice + v);
        const float d_i[4] = {row.x, row.y, row.z, row.w};
        add(i, d_i, 0);
        add(i, d_i, 1);
      }
      const auto solve = [&](int i, int half) {
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
        if (half == 0) add(i, d_i, 0);
        add(i, d_i, 1);
      };
      for (int i = j0; i < min(j1, 32); ++i) solve(i, 0);
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
    for (int j = j0 + warp; j < j1; j += kThreads / 32) {
      const float o_v = lane < values ? o[j * kValues + lane] : 0.0f;
      const float sum = WarpSum(__fmul_rn(o_v, o_v));
      if (lane == 0) Broadcast(cell_squares + blockIdx.x * kRows + j, sum);
    }
    cluster.sync();
    for (int j = j0 + warp; j < j1; j += kThreads / 32) {
      const float total = AddSlices(cell_squares + j, kRows, static_cast<int>(gridDim.x));
      if (lane < values) {
        StoreOutput<Act>(p, t0 + j, h, v0 + lane, o[j * kValues + lane], total);
      }
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
    Fold(dim, values, from_grid[kRows - 1], state, at.stride, keys, at.stride, d, kSlice,
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

// early: the kernel may begin before the one in front of it has ended, and waits for it itself.
template <typename Kernel, typename... Args>
cudaError_t LaunchClusters(Kernel* kernel, bool early, dim3 grid, size_t bytes, cudaStream_t stream,
                           Args... args) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = grid.x;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = early ? 1 : 0;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Few heads are cut into slices that fill the device; of many, every block takes a whole one.
constexpr int64_t kWholeHeads = 264;

template <typename Act>
LaunchStatus States(const DeltaNetProblem& p, cudaStream_t stream) {
  const unsigned slices = static_cast<unsigned>((p.v_dim + kSlice - 1) / kSlice);
  const unsigned heads = static_cast<unsigned>(p.num_v_heads);
  const unsigned sequences = static_cast<unsigned>(p.num_sequences);
  const bool whole = p.num_sequences * p.num_v_heads >= kWholeHeads;
  const int values = whole ? static_cast<int>(p.v_dim) : kSlice;
  const size_t bytes = ((kRows + 2) * values + 3 * kRows + kMaxSlices) * sizeof(float);
  auto* step = whole ? (p.k_dim <= 128 ? StepStateKernel<Act, 4, 4> : StepStateKernel<Act, 2, 8>)
                     : (p.k_dim <= 128 ? StepStateKernel<Act, 1, 4> : StepStateKernel<Act, 1, 8>);
  cudaError_t error = LaunchClusters(step, true, dim3(whole ? 1 : slices, heads, sequences), bytes,
                                     stream, p, values);
  if (error == cudaSuccess && p.num_tokens > p.num_sequences) {
    const size_t cell_bytes = CellShared(static_cast<int>(p.k_dim)).size * sizeof(float);
    error = LaunchClusters(CellStateKernel<Act>, false, dim3(slices, heads, sequences), cell_bytes,
                           stream, p);
  }
  return static_cast<LaunchStatus>(error);
}

}  // namespace

LaunchStatus LaunchStates(const DeltaNetProblem& p, cudaStream_t stream) {
  return p.bf16 ? States<BF16>(p, stream) : States<float>(p, stream);
}

const char* CannotRunDeltaNetCuda(const DeltaNetProblem& p) {
  if (p.qkv_stride % 4 != 0) return "needs rows of qkv that begin at multiples of 4 elements";
  if (p.num_sequences > 65535) return "runs at most 65535 sequences";
  return nullptr;
}

LaunchStatus LaunchDeltaNet(const DeltaNetProblem& p, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  LaunchStatus status = LaunchGrams(p, s);
  if (status == LaunchStatus::kOk) status = LaunchStates(p, s);
  if (status == LaunchStatus::kOk) status = LaunchRings(p, s);
  return status;
}

}  // namespace lockstep
