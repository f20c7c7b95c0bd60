// Sequences of one row of the gated delta net. Both kernels here give a row what CellStateKernel
// gives it, by the arithmetic of delta_net_device.cuh.
#include "kernels/delta_net/delta_net_device.cuh"

namespace lockstep {
namespace {

constexpr size_t kMaxSharedBytes = 227 * 1024;
constexpr int kStepThreads = 128;

// Norms, Gram coefficients, gates and ring rows of a sequence of one row; a block per key head.
template <typename Act>
__global__ void __launch_bounds__(kStepThreads) StepGramKernel(DeltaNetProblem p) {
  __shared__ float k[kMaxDeltaNetDim], q[kMaxDeltaNetDim];
  __shared__ float scales[2];
  // WholeStepKernel may load its states meanwhile.
  cudaTriggerProgrammaticLaunchCompletion();
  const int thread = threadIdx.x, warp = thread / 32;
  const int64_t k_head = blockIdx.x;
  const SequenceRows s(p, blockIdx.y);
  if (s.rows != 1) return;
  const int dim = static_cast<int>(p.k_dim), j = s.start % kRows;
  const int64_t t = s.begin, key_stride = p.num_k_heads * p.k_dim;
  const Act* q_raw = As<Act>(p.qkv) + t * p.qkv_stride + k_head * dim;
  const Act* k_raw = q_raw + key_stride;
  float* ring = p.ring_k + s.slot * kRows * key_stride + k_head * dim;
  if (warp < 2) {
    const float scale = L2Scale(warp == 0 ? k_raw : q_raw, dim);
    if (thread % 32 == 0) {
      scales[warp] = scale;
      p.scales[(t * p.num_k_heads + k_head) * 2 + warp] = scale;
    }
  } else {
    const int64_t ratio = p.num_v_heads / p.num_k_heads;
    for (int64_t r = thread - 64; r < ratio; r += kStepThreads - 64) {
      const int64_t h = k_head * ratio + r;
      float* gates = p.ring_g + s.slot * kRows * p.num_v_heads + h;
      const float g = GateOf<Act>(p, t, h);
      const float sum = j == 0 ? g : __fadd_rn(gates[(j - 1) * p.num_v_heads], g);
      gates[j * p.num_v_heads] = sum;
      *reinterpret_cast<float2*>(p.gates + (t * p.num_v_heads + h) * 2) =
          make_float2(sum, BetaOf<Act>(p, t, h));
    }
  }
  __syncthreads();
  const float factor = QueryFactor(dim);
  for (int i = thread; i < dim; i += kStepThreads) {
    const float key = __fmul_rn(ToFloat(k_raw[i]), scales[0]);
    k[i] = key;
    q[i] = __fmul_rn(__fmul_rn(ToFloat(q_raw[i]), scales[1]), factor);
    ring[j * key_stride + i] = key;
  }
  __syncthreads();
  float* grams = p.grams + (t * p.num_k_heads + k_head) * 2 * kRows;
  const int lane = thread % 8;
#pragma unroll 4
  for (int first = 0; first <= j; first += kStepThreads / 8) {
    const int i = first + thread / 8;
    float kk = 0.0f, kq = 0.0f;
    if (i <= j) {
      const float* row = i < j ? ring + i * key_stride : k;
      for (int c = 4 * lane; c < dim; c += 32) {
        const float4 key = Load4(row + c);
        kk = Dot4(key, Load4(k + c), kk);
        kq = Dot4(key, Load4(q + c), kq);
      }
    }
    kk = JoinLanes(kk);
    kq = JoinLanes(kq);
    if (lane == 0 && i <= j) {
      grams[i] = kk;
      grams[kRows + i] = kq;
    }
  }
}

// Shared memory of one head of WholeStepKernel, in bytes.
struct HeadShared {
  int state;     // [Dv, Dk]
  int d;         // [kRows][Dv]
  int grams;     // 2 x [kRows]
  int gates;     // [kRows] of the ring
  int scalars;   // k scale, q scale, G_j, beta
  int k, q;      // act [Dk]
  int value, z;  // act [Dv]
  int size;

  __host__ __device__ HeadShared(int k_dim, int v_dim, int act_size) {
    state = 0;
    d = state + v_dim * k_dim * 4;
    grams = d + kRows * v_dim * 4;
    gates = grams + 2 * kRows * 4;
    scalars = gates + kRows * 4;
    k = scalars + 16;
    q = k + k_dim * act_size;
    value = q + k_dim * act_size;
    z = value + v_dim * act_size;
    size = z + v_dim * act_size;
  }
};

__device__ void CopyAsync16(void* to, const void* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from));
}

constexpr int kStages = 2;          // heads in shared memory
constexpr int kWholeThreads = 512;  // that compute
constexpr int kLoadThreads = 64;    // that load, per stage

// Named barriers of a block: kComputing among the threads that compute; a stage is full, and empty
// again, between them and the threads that load it.
enum Barrier { kComputing = 1, kFull = 2, kEmpty = kFull + kStages };
template <int kThreadsOfIt>
__device__ void Sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreadsOfIt) : "memory");
}
__device__ void Arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kWholeThreads + kLoadThreads) : "memory");
}

// Sequences of one row, many heads: a block walks over whole heads, the next one's loads in flight.
template <typename Act>
__global__ void __launch_bounds__(kWholeThreads + kStages * kLoadThreads, 1)
    WholeStepKernel(const DeltaNetProblem p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int k_dim = static_cast<int>(p.k_dim), v_dim = static_cast<int>(p.v_dim);
  const int v_heads = static_cast<int>(p.num_v_heads);
  const int ratio = v_heads / static_cast<int>(p.num_k_heads);
  const HeadShared at(k_dim, v_dim, sizeof(Act));
  float* state_k = reinterpret_cast<float*>(shared + kStages * at.size);
  float* state_q = state_k + v_dim;
  float* sums_q = state_q + v_dim;
  float* ck = sums_q + v_dim;  // [kRows]
  float* cq = ck + kRows;
  float* decays = cq + kRows;
  float* squares = decays + kRows;  // [kMaxSlices]
  const int thread = threadIdx.x, lane = thread % 8, group = thread / 8;
  const int units = static_cast<int>(p.num_sequences) * v_heads;
  const int64_t d_stride = p.num_v_heads * p.v_dim, key_stride = p.num_k_heads * p.k_dim;
  const float factor = QueryFactor(k_dim);

  if (thread >= kWholeThreads) {
    const int loader = (thread - kWholeThreads) % kLoadThreads;
    const int stage = (thread - kWholeThreads) / kLoadThreads;
    uint8_t* to = shared + stage * at.size;
    bool first = true;
    for (int unit = blockIdx.x + stage * gridDim.x; unit < units; unit += kStages * gridDim.x) {
      const SequenceRows s(p, unit / v_heads);
      const int h = unit % v_heads, j = s.start % kRows;
      if (!first) Sync<kWholeThreads + kLoadThreads>(kEmpty + stage);
      if (s.rows == 1) {
        const float* state = p.state + (s.slot * v_heads + h) * v_dim * k_dim;
        if (s.start > 0) {
#pragma unroll 8
          for (int i = 4 * loader; i < v_dim * k_dim; i += 4 * kLoadThreads) {
            CopyAsync16(to + at.state + 4 * i, state + i);
          }
        }
        const float* ring = p.ring_d + s.slot * kRows * d_stride + h * v_dim;
        const int columns = v_dim / 4;
#pragma unroll 4
        for (int i = loader; i < j * columns; i += kLoadThreads) {
          CopyAsync16(to + at.d + 16 * i, ring + i / columns * d_stride + i % columns * 4);
        }
        const Act* row = As<Act>(p.qkv) + s.begin * p.qkv_stride;
        const Act* z = As<Act>(p.z) + s.begin * p.z_stride + h * v_dim;
        constexpr int kSixteen = 16 / sizeof(Act);
        for (int i = loader; i < k_dim / kSixteen; i += kLoadThreads) {
          const Act* q = row + h / ratio * k_dim + kSixteen * i;
          CopyAsync16(to + at.q + 16 * i, q);
          CopyAsync16(to + at.k + 16 * i, q + key_stride);
        }
        for (int i = loader; i < v_dim / kSixteen; i += kLoadThreads) {
          CopyAsync16(to + at.value + 16 * i, row + 2 * key_stride + h * v_dim + kSixteen * i);
          CopyAsync16(to + at.z + 16 * i, z + kSixteen * i);
        }
      }
      // From here on, what StepGramKernel has written.
      if (first) cudaGridDependencySynchronize();
      first = false;
      if (s.rows == 1) {
        const int64_t t_k = s.begin * p.num_k_heads + h / ratio;
        if (loader < 2 * kRows / 4) {
          CopyAsync16(to + at.grams + 16 * loader, p.grams + t_k * 2 * kRows + 4 * loader);
        }
        float* gates = reinterpret_cast<float*>(to + at.gates);
        if (loader < j) gates[loader] = p.ring_g[(s.slot * kRows + loader) * v_heads + h];
        float* scalars = reinterpret_cast<float*>(to + at.scalars);
        if (loader < 2) {
          scalars[loader] = p.scales[t_k * 2 + loader];
          scalars[2 + loader] = p.gates[(s.begin * v_heads + h) * 2 + loader];
        }
      }
      asm volatile("cp.async.wait_all;" ::: "memory");
      Arrive(kFull + stage);
    }
    if (first) cudaGridDependencySynchronize();
    return;
  }

  const float norm_weight = thread < v_dim ? ReadScalar(p.norm_weight, p.norm_bf16, thread) : 0.0f;
  const auto compute_head = [&](int unit, const SequenceRows& s, int stage) {
    const int64_t h = unit % v_heads, t = s.begin;
    const int j = s.start % kRows;
    const bool fresh = s.start == 0;
    uint8_t* head = shared + stage * at.size;
    const float* state = reinterpret_cast<const float*>(head + at.state);
    float* d = reinterpret_cast<float*>(head + at.d);
    const float* scalars = reinterpret_cast<const float*>(head + at.scalars);
    const Act* k_raw = reinterpret_cast<const Act*>(head + at.k);
    const Act* q_raw = reinterpret_cast<const Act*>(head + at.q);
    const float g_j = scalars[2], beta = scalars[3];
#pragma unroll 2
    for (int v = group; v < v_dim; v += kWholeThreads / 8) {
      float sum_k = 0.0f, sum_q = 0.0f;
      if (!fresh) {
#pragma unroll 4
        for (int i = 4 * lane; i < k_dim; i += 32) {
          const float4 x = Load4(state + v * k_dim + i);
          sum_k = Dot4(x, Scale4(Load4(k_raw + i), scalars[0]), sum_k);
          sum_q = Dot4(x, Scale4(Scale4(Load4(q_raw + i), scalars[1]), factor), sum_q);
        }
      }
      sum_k = JoinLanes(sum_k);
      sum_q = JoinLanes(sum_q);
      if (lane == 0) {
        state_k[v] = sum_k;
        state_q[v] = sum_q;
      }
    }
    if (thread <= j) {
      const float* grams = reinterpret_cast<const float*>(head + at.grams);
      const float* gates = reinterpret_cast<const float*>(head + at.gates);
      const float decay = Exp(__fsub_rn(g_j, thread == j ? g_j : gates[thread]));
      decays[thread] = decay;
      ck[thread] = __fmul_rn(decay, grams[thread]);
      cq[thread] = __fmul_rn(decay, grams[kRows + thread]);
    }
    Sync<kWholeThreads>(kComputing);

    // One half of the block adds for d, the other for o.
    constexpr int kHalf = kWholeThreads / 2;
    const int v = thread % kHalf;
    const bool for_o = thread >= kHalf;
    float sum = 0.0f;
    if (v < v_dim) {
      const float* c = for_o ? cq : ck;
#pragma unroll 8
      for (int i = 0; i < j; ++i) sum = __fmaf_rn(c[i], d[i * v_dim + v], sum);
      if (for_o) sums_q[v] = sum;
    }
    Sync<kWholeThreads>(kComputing);
    const float from_grid = Exp(g_j);
    float o = 0.0f;
    if (thread < v_dim) {
      const float value = ToFloat(reinterpret_cast<const Act*>(head + at.value)[v]);
      const float old = __fmul_rn(from_grid, state_k[v]);
      const float d_j = __fmul_rn(beta, __fsub_rn(__fsub_rn(value, old), sum));
      o = __fadd_rn(__fmul_rn(from_grid, state_q[v]), __fmaf_rn(cq[j], d_j, sums_q[v]));
      p.ring_d[(s.slot * kRows + j) * d_stride + h * v_dim + v] = d_j;
      d[j * v_dim + v] = d_j;
    }
    if (thread - thread % 32 < v_dim) {
      const float slice = WarpSum(__fmul_rn(o, o));
      if (thread % 32 == 0) squares[v / kSlice] = slice;
    }
    Sync<kWholeThreads>(kComputing);
    if (thread < v_dim) {
      StoreOutput<Act>(p, t, h, v, o, AddSlices(squares, 1, (v_dim + kSlice - 1) / kSlice),
                       norm_weight, ToFloat(reinterpret_cast<const Act*>(head + at.z)[v]));
    }
    float* slot_state = p.state + (s.slot * v_heads + h) * v_dim * k_dim;
    if (fresh) {
      for (int i = 4 * thread; i < v_dim * k_dim; i += 4 * kWholeThreads) {
        *reinterpret_cast<float4*>(slot_state + i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
    if (j != kRows - 1) return;
    for (int i = thread; i < kRows * v_dim; i += kWholeThreads) {
      d[i] = __fmul_rn(decays[i / v_dim], d[i]);
    }
    Sync<kWholeThreads>(kComputing);
    const float* keys = p.ring_k + s.slot * kRows * key_stride + h / ratio * k_dim;
    Fold(
        kWholeThreads, k_dim, v_dim, from_grid, state, k_dim,
        [&](int i, int k) { return Load4(keys + i * key_stride + k); }, d, v_dim,
        [&](int row, int k, float4 x) {
          *reinterpret_cast<float4*>(slot_state + row * k_dim + k) = x;
          ForSnapshots(p.batch, unit / v_heads, s.end(), [&](int64_t snapshot) {
            float* to = p.state_snapshot + (snapshot * v_heads + h) * v_dim * k_dim;
            *reinterpret_cast<float4*>(to + row * k_dim + k) = x;
          });
        });
  };
  cudaGridDependencySynchronize();
  int count = 0;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x, ++count) {
    const int stage = count % kStages;
    const SequenceRows s(p, unit / v_heads);
    Sync<kWholeThreads + kLoadThreads>(kFull + stage);
    if (s.rows == 1) compute_head(unit, s, stage);
    // Nobody waits for a stage that is not loaded again.
    if (unit + kStages * static_cast<int>(gridDim.x) < units) Arrive(kEmpty + stage);
    Sync<kWholeThreads>(kComputing);  // the next head takes the same places
  }
}

// Sequences of one row, few heads: a cluster per head, a block per slice of its values, everything
// in one kernel. kChunks: groups of four elements that a thread has of a row of Dk.
template <typename Act, int kChunks>
__global__ void __launch_bounds__(kThreads) SliceStepKernel(const DeltaNetProblem p) {
  __shared__ __align__(16) float d[kRows * kSlice];
  __shared__ __align__(16) float own_key[kMaxDeltaNetDim];
  __shared__ float state_k[kSlice], state_q[kSlice], sums_q[kSlice];
  __shared__ float ck[kRows], cq[kRows], decays[kRows], squares[kMaxSlices];
  const SequenceRows s(p, blockIdx.z);
  if (s.rows != 1) return;
  cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  cluster.barrier_arrive();  // that every block has begun is waited for before Broadcast
  const int64_t h = blockIdx.y, t = s.begin;
  const int64_t ratio = p.num_v_heads / p.num_k_heads, k_head = h / ratio;
  const int k_dim = static_cast<int>(p.k_dim), v_dim = static_cast<int>(p.v_dim);
  const int v0 = blockIdx.x * kSlice, values = min(kSlice, v_dim - v0);
  const int j = s.start % kRows;
  const int thread = threadIdx.x, lane = thread % 8, group = thread / 8;
  const bool fresh = s.start == 0;

  const int64_t d_stride = p.num_v_heads * p.v_dim, key_stride = p.num_k_heads * p.k_dim;
  float* ring_d = p.ring_d + s.slot * kRows * d_stride + h * v_dim + v0;
  for (int i = thread; i < j * values / 4; i += kThreads) {
    const int row = i / (values / 4), column = i % (values / 4) * 4;
    CopyAsync16(d + row * kSlice + column, ring_d + row * d_stride + column);
  }
  float* ring_k = p.ring_k + s.slot * kRows * key_stride + k_head * k_dim;
  float* ring_g = p.ring_g + s.slot * kRows * p.num_v_heads + h;
  float* state = p.state + ((s.slot * p.num_v_heads + h) * v_dim + v0) * k_dim;
  const Act* q_raw = As<Act>(p.qkv) + t * p.qkv_stride + k_head * k_dim;
  const Act* k_raw = q_raw + key_stride;
  const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float4 x[kChunks], keys[2][kChunks], k[kChunks], q[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int i = 4 * lane + 32 * c;
    const bool inside = i < k_dim;
    x[c] = inside && group < values && !fresh ? Load4(state + group * k_dim + i) : zeros;
    keys[0][c] = inside && group < j ? Load4(ring_k + group * key_stride + i) : zeros;
    keys[1][c] = inside && group + 32 < j ? Load4(ring_k + (group + 32) * key_stride + i) : zeros;
    k[c] = inside ? Load4(k_raw + i) : zeros;
    q[c] = inside ? Load4(q_raw + i) : zeros;
  }
  float gate_of_row[2];
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int i = group + 32 * u;
    gate_of_row[u] = i < j ? ring_g[i * p.num_v_heads] : 0.0f;
  }
  float value = 0.0f, z = 0.0f, norm_weight = 0.0f;
  if (thread < values) {
    norm_weight = ReadScalar(p.norm_weight, p.norm_bf16, v0 + thread);
    const int64_t column = h * v_dim + v0 + thread;
    value = ToFloat(As<Act>(p.qkv)[t * p.qkv_stride + 2 * key_stride + column]);
    z = ToFloat(As<Act>(p.z)[t * p.z_stride + column]);
  }
  const float g = GateOf<Act>(p, t, h), beta = BetaOf<Act>(p, t, h);
  const float g_j = j == 0 ? g : __fadd_rn(ring_g[(j - 1) * p.num_v_heads], g);
  float squares_k = 0.0f, squares_q = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (4 * lane + 32 * c >= k_dim) break;
    squares_k = Dot4(k[c], k[c], squares_k);
    squares_q = Dot4(q[c], q[c], squares_q);
  }
  const float k_scale = L2ScaleOf(squares_k), q_scale = L2ScaleOf(squares_q);
  const float factor = QueryFactor(k_dim);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    k[c] = Scale4(k[c], k_scale);
    q[c] = Scale4(Scale4(q[c], q_scale), factor);
  }

  float sum_k = 0.0f, sum_q = 0.0f, sum_kk[2] = {}, sum_kq[2] = {};
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (4 * lane + 32 * c >= k_dim) break;
    sum_k = Dot4(x[c], k[c], sum_k);
    sum_q = Dot4(x[c], q[c], sum_q);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const float4 key = group + 32 * u == j ? k[c] : keys[u][c];
      sum_kk[u] = Dot4(key, k[c], sum_kk[u]);
      sum_kq[u] = Dot4(key, q[c], sum_kq[u]);
    }
  }
  sum_k = JoinLanes(sum_k);
  sum_q = JoinLanes(sum_q);
  if (lane == 0 && group < values) {
    state_k[group] = sum_k;
    state_q[group] = sum_q;
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int i = group + 32 * u;
    const float kk = JoinLanes(sum_kk[u]), kq = JoinLanes(sum_kq[u]);
    if (lane == 0 && i <= j) {
      const float decay = Exp(__fsub_rn(g_j, i == j ? g_j : gate_of_row[u]));
      decays[i] = decay;
      ck[i] = __fmul_rn(decay, kk);
      cq[i] = __fmul_rn(decay, kq);
    }
  }
  if (thread < 8) {
    const bool writes_ring = blockIdx.x == 0 && h % ratio == 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int i = 4 * lane + 32 * c;
      if (i >= k_dim) break;
      *reinterpret_cast<float4*>(own_key + i) = k[c];
      if (writes_ring) *reinterpret_cast<float4*>(ring_k + j * key_stride + i) = k[c];
    }
    if (thread == 0 && blockIdx.x == 0) ring_g[j * p.num_v_heads] = g_j;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();

  // The first warp adds for d, the second for o.
  const int v = thread % 32;
  float sum = 0.0f;
  if (thread < 64 && v < values) {
    const float* c = thread < 32 ? ck : cq;
#pragma unroll 8
    for (int i = 0; i < j; ++i) sum = __fmaf_rn(c[i], d[i * kSlice + v], sum);
    if (thread >= 32) sums_q[v] = sum;
  }
  __syncthreads();
  const float from_grid = Exp(g_j);
  cluster.barrier_wait();
  float o = 0.0f;
  if (thread < 32) {
    if (v < values) {
      const float old = __fmul_rn(from_grid, state_k[v]);
      const float d_j = __fmul_rn(beta, __fsub_rn(__fsub_rn(value, old), sum));
      o = __fadd_rn(__fmul_rn(from_grid, state_q[v]), __fmaf_rn(cq[j], d_j, sums_q[v]));
      ring_d[j * d_stride + v] = d_j;
      d[j * kSlice + v] = d_j;
    }
    const float slice = WarpSum(__fmul_rn(o, o));
    if (v == 0) Broadcast(squares + blockIdx.x, slice);
  }
  cluster.sync();
  if (thread < values) {
    StoreOutput<Act>(p, t, h, v0 + v, o, AddSlices(squares, 1, static_cast<int>(gridDim.x)),
                     norm_weight, z);
  }

  if (fresh) {
    for (int i = thread; i < values * k_dim / 4; i += kThreads) {
      reinterpret_cast<float4*>(state)[i] = zeros;
    }
  }
  if (j != kRows - 1) return;
  for (int i = thread; i < kRows * kSlice; i += kThreads) {
    if (i % kSlice < values) d[i] = __fmul_rn(decays[i / kSlice], d[i]);
  }
  __syncthreads();
  Fold(
      kThreads, k_dim, values, from_grid, state, k_dim,
      [&](int i, int c) {
        return Load4(i < kRows - 1 ? ring_k + i * key_stride + c : own_key + c);
      },
      d, kSlice,
      [&](int row, int c, float4 sum4) {
        *reinterpret_cast<float4*>(state + row * k_dim + c) = sum4;
        ForSnapshots(p.batch, blockIdx.z, s.end(), [&](int64_t snapshot) {
          float* to = p.state_snapshot + ((snapshot * p.num_v_heads + h) * v_dim + v0) * k_dim;
          *reinterpret_cast<float4*>(to + row * k_dim + c) = sum4;
        });
      });
}

// From as many heads on as two for every block of a large device, blocks walk over whole heads.
constexpr int64_t kManyHeads = 264;

template <typename Act>
LaunchStatus Steps(const DeltaNetProblem& p, cudaStream_t stream) {
  const int k_dim = static_cast<int>(p.k_dim), v_dim = static_cast<int>(p.v_dim);
  const unsigned sequences = static_cast<unsigned>(p.num_sequences);
  const int64_t units = p.num_sequences * p.num_v_heads;
  const size_t bytes = kStages * HeadShared(k_dim, v_dim, sizeof(Act)).size +
                       (3 * v_dim + 3 * kRows + kMaxSlices) * sizeof(float);
  if (units < kManyHeads || bytes > kMaxSharedBytes) {
    const unsigned slices = static_cast<unsigned>((v_dim + kSlice - 1) / kSlice);
    auto* kernel = k_dim <= 128 ? SliceStepKernel<Act, 4> : SliceStepKernel<Act, 8>;
    return static_cast<LaunchStatus>(
        LaunchClusters(kernel, false, dim3(slices, static_cast<unsigned>(p.num_v_heads), sequences),
                       0, stream, p));
  }
  const dim3 grams(static_cast<unsigned>(p.num_k_heads), sequences);
  StepGramKernel<Act><<<grams, kStepThreads, 0, stream>>>(p);
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(WholeStepKernel<Act>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(bytes));
  }
  if (error != cudaSuccess) return static_cast<LaunchStatus>(error);
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(units < processors ? units : processors));
  config.blockDim = dim3(kWholeThreads + kStages * kLoadThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return static_cast<LaunchStatus>(cudaLaunchKernelEx(&config, WholeStepKernel<Act>, p));
}

}  // namespace

LaunchStatus LaunchSteps(const DeltaNetProblem& p, cudaStream_t stream) {
  return p.bf16 ? Steps<BF16>(p, stream) : Steps<float>(p, stream);
}

const char* CannotRunDeltaNetCuda(const DeltaNetProblem& p) {
  const int64_t sixteen = p.bf16 ? 8 : 4;
  if (p.qkv_stride % sixteen != 0 || p.z_stride % sixteen != 0 ||
      reinterpret_cast<uintptr_t>(p.qkv) % 16 != 0 || reinterpret_cast<uintptr_t>(p.z) % 16 != 0) {
    return "needs rows of qkv and z that begin at multiples of 16 bytes";
  }
  if (p.num_sequences > 65535) return "runs at most 65535 sequences";
  return nullptr;
}

LaunchStatus LaunchDeltaNet(const DeltaNetProblem& p, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  LaunchStatus status = LaunchSteps(p, s);
  if (p.num_tokens == p.num_sequences) return status;
  if (status == LaunchStatus::kOk) status = LaunchCellGrams(p, s);
  if (status == LaunchStatus::kOk) status = LaunchCells(p, s);
  if (status == LaunchStatus::kOk) status = LaunchRings(p, s);
  return status;
}

}  // namespace lockstep
