// The CPU arm of the matrix product, built once per instruction set. Lanes are sixteen output rows;
// for each k one vector of weights is decoded and multiplied with one element of every row of x in
// the tile. Each output is one chain of fused multiply-adds with k ascending, whatever the tile's
// shape and wherever the sum waits in between.
#include "kernels/base/simd.h"
#include "kernels/gemm/gemm_args.h"

#define LOCKSTEP_INLINE inline __attribute__((always_inline))

namespace lockstep {
namespace LOCKSTEP_ISA {
namespace {

// Where the groups of a tile lie. `rows` is 16 but for a last, partial group.
template <int kGroups>
struct TileWeights {
  const uint8_t* codes[kGroups];
  const uint8_t* block16_scales[kGroups];
  int rows;
};

struct F32Format {
  static constexpr int64_t kUnitBytes = 4;
  template <bool kPartial>
  static LOCKSTEP_INLINE F32x16 Decode(const uint8_t* p, int rows) {
    const float* f = reinterpret_cast<const float*>(p);
    return kPartial ? LoadLanes(f, rows) : Load(f);
  }
};

struct BF16Format {
  static constexpr int64_t kUnitBytes = 2;
  template <bool kPartial>
  static LOCKSTEP_INLINE F32x16 Decode(const uint8_t* p, int rows) {
    const uint16_t* h = reinterpret_cast<const uint16_t*>(p);
    return kPartial ? LoadBF16Lanes(h, rows) : LoadBF16(h);
  }
};

struct Fp8Format {
  static constexpr int64_t kUnitBytes = 1;
  template <bool kPartial>
  static LOCKSTEP_INLINE F32x16 Decode(const uint8_t* p, int rows) {
    return kPartial ? LoadE4M3Lanes(p, rows) : LoadE4M3(p);
  }
};

struct Nvfp4Format {};

template <int kGroups, int kTokens>
LOCKSTEP_INLINE void MultiplyAdd(const F32x16 (&w)[kGroups], const float* x,
                                 F32x16 (&acc)[kGroups][kTokens]) {
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
    const F32x16 xt = Set(x[t]);
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) acc[g][t] = Fma(w[g], xt, acc[g][t]);
  }
}

// acc += the products of k in [begin, end), ascending. x points to the tile's k = 0.
template <bool kPartial, typename Format, int kGroups, int kTokens>
LOCKSTEP_INLINE void Accumulate(Format, const TileWeights<kGroups>& weights, int64_t begin,
                                int64_t end, const float* x, int64_t x_stride,
                                F32x16 (&acc)[kGroups][kTokens]) {
  const int64_t stride = Format::kUnitBytes * (kPartial ? weights.rows : kGroupRows);
  for (int64_t k = begin; k < end; ++k) {
    F32x16 w[kGroups];
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      w[g] = Format::template Decode<kPartial>(weights.codes[g] + k * stride, weights.rows);
    }
    MultiplyAdd<kGroups, kTokens>(w, x + k * x_stride, acc);
  }
}

// E2M1 x E4M3 is exact in F32. Segments of NVFP4 are whole blocks of 16.
template <bool kPartial, int kGroups, int kTokens>
LOCKSTEP_INLINE void Accumulate(Nvfp4Format, const TileWeights<kGroups>& weights, int64_t begin,
                                int64_t end, const float* x, int64_t x_stride,
                                F32x16 (&acc)[kGroups][kTokens]) {
  const int64_t rows = kPartial ? weights.rows : kGroupRows;
  for (int64_t block = begin / 16; block < end / 16; ++block) {
    F32x16 scale[kGroups];
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      scale[g] =
          Fp8Format::Decode<kPartial>(weights.block16_scales[g] + block * rows, weights.rows);
    }
    for (int64_t pair = block * 8; pair < block * 8 + 8; ++pair) {
      F32x16 even[kGroups];
      F32x16 odd[kGroups];
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        const uint8_t* p = weights.codes[g] + pair * rows;
        if (kPartial) {
          LoadE2M1Lanes(p, weights.rows, &even[g], &odd[g]);
        } else {
          LoadE2M1(p, &even[g], &odd[g]);
        }
        even[g] = Mul(even[g], scale[g]);
        odd[g] = Mul(odd[g], scale[g]);
      }
      MultiplyAdd<kGroups, kTokens>(even, x + 2 * pair * x_stride, acc);
      MultiplyAdd<kGroups, kTokens>(odd, x + (2 * pair + 1) * x_stride, acc);
    }
  }
}

float ScaleAt(const GemmArgs& a, int64_t index) {
  if (!a.scales_bf16) return static_cast<const float*>(a.scales)[index];
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(a.scales)[index]) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

// Where the scales of a group's rows begin: indices into `scales` (of a segment's column 0).
struct RowScales {
  int64_t index[kGroupRows];
  bool uniform;  // all the same
};

RowScales FindRowScales(const GemmArgs& a, int64_t group, int rows) {
  RowScales found;
  found.uniform = true;
  const BlockRows* r = a.block_rows;
  for (int i = 0; i < rows; ++i) {
    const int64_t row = group * kGroupRows + i;
    if (a.scaling == WeightScaling::kBlock128) {
      while (row >= r->end) ++r;
      found.index[i] = (r->scale_row + (r->offset + row - r->begin) / 128) * a.scale_columns;
    } else {
      found.index[i] = row;
    }
    found.uniform = found.uniform && found.index[i] == found.index[0];
  }
  return found;
}

// The weight scales of a group's rows under one segment.
F32x16 WeightScale(const GemmArgs& a, const KSegment& segment, const RowScales& where, int rows) {
  if (a.scaling == WeightScaling::kTensor) return Set(a.tensor_scale);
  if (a.scaling == WeightScaling::kChannel && rows == kGroupRows) {
    return a.scales_bf16 ? LoadBF16(static_cast<const uint16_t*>(a.scales) + where.index[0])
                         : Load(static_cast<const float*>(a.scales) + where.index[0]);
  }
  const int64_t column = a.scaling == WeightScaling::kBlock128 ? segment.weight_scale : 0;
  if (where.uniform) return Set(ScaleAt(a, where.index[0] + column));
  float s[kGroupRows] = {};
  for (int i = 0; i < rows; ++i) s[i] = ScaleAt(a, where.index[i] + column);
  return Load(s);
}

// sum, times (activation scale x weight scale) formed first.
F32x16 Scaled(const GemmArgs& a, F32x16 sum, F32x16 weight_scale, const float* act_scale) {
  if (act_scale != nullptr) {
    const F32x16 act = Set(*act_scale);
    return Mul(sum, a.scaling == WeightScaling::kNone ? act : Mul(act, weight_scale));
  }
  return a.scaling == WeightScaling::kNone ? sum : Mul(sum, weight_scale);
}

// sums[s * stride + i] is sum i of virtual shard s; afterwards shard 0 holds the tree over all.
void JoinShards(float (*sums)[16], int64_t stride, int64_t count, int64_t shards) {
  for (int64_t width = 1; width < shards; width *= 2) {
    for (int64_t s = 0; s + width < shards; s += 2 * width) {
      for (int64_t i = 0; i < count; ++i) {
        float* sum = sums[s * stride + i];
        Store(sum, Add(Load(sum), Load(sums[(s + width) * stride + i])));
      }
    }
  }
}

void StoreOut(const GemmArgs& a, int64_t at, F32x16 v, int rows) {
  if (a.out_bf16) {
    uint16_t* out = static_cast<uint16_t*>(a.out) + at;
    rows == kGroupRows ? StoreBF16(out, v) : StoreBF16Lanes(out, v, rows);
  } else if (rows == kGroupRows) {
    Store(static_cast<float*>(a.out) + at, v);
  } else {
    StoreLanes(static_cast<float*>(a.out) + at, v, rows);
  }
}

// Joins the virtual shards of one group, or keeps them apart, and stores what there is.
void StoreSums(const GemmArgs& a, int64_t group, int rows, int64_t token, int64_t tokens,
               float (*sums)[16], int64_t stride) {
  const bool join = a.out_shard_stride == 0;
  if (join) JoinShards(sums, stride, tokens, a.shards);
  for (int64_t s = 0; s < (join ? 1 : a.shards); ++s) {
    for (int64_t t = 0; t < tokens; ++t) {
      StoreOut(a, s * a.out_shard_stride + (token + t) * a.out_stride + group * kGroupRows,
               Load(sums[s * stride + t]), rows);
    }
  }
}

template <typename Format>
struct RowBytes {
  static int64_t Of(int64_t k) { return k * Format::kUnitBytes; }
};
template <>
struct RowBytes<Nvfp4Format> {
  static int64_t Of(int64_t k) { return k / 2; }
};

template <typename Format, bool kPartial, int kGroups>
TileWeights<kGroups> WeightsOf(const GemmArgs& a, int64_t group) {
  TileWeights<kGroups> weights;
  weights.rows = kPartial ? static_cast<int>(a.n - group * kGroupRows) : kGroupRows;
  for (int g = 0; g < kGroups; ++g) {
    weights.codes[g] = a.codes + (group + g) * kGroupRows * RowBytes<Format>::Of(a.k);
    weights.block16_scales[g] = a.block16_scales == nullptr
                                    ? nullptr
                                    : a.block16_scales + (group + g) * kGroupRows * (a.k / 16);
  }
  return weights;
}

// Output rows of kGroups groups from `group` for tokens [token, token + kTokens) of a tile of x.
template <typename Format, bool kPartial, int kGroups, int kTokens>
void Tile(const GemmArgs& a, int64_t group, int64_t token, const float* x, int64_t x_stride) {
  const TileWeights<kGroups> weights = WeightsOf<Format, kPartial, kGroups>(a, group);
  RowScales row_scales[kGroups];
  if (a.scaling == WeightScaling::kChannel || a.scaling == WeightScaling::kBlock128) {
    for (int g = 0; g < kGroups; ++g) row_scales[g] = FindRowScales(a, group + g, weights.rows);
  }
  alignas(64) float sums[kGroups][kMaxShards * kTokens][16];
  int64_t shard = -1;
  for (int64_t i = 0; i < a.num_segments; ++i) {
    const KSegment& segment = a.segments[i];
    F32x16 acc[kGroups][kTokens];
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) acc[g][t] = Zero();
    }
    Accumulate<kPartial>(Format(), weights, segment.begin, segment.end, x, x_stride, acc);
    const bool first = segment.shard != shard;
    shard = segment.shard;
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      const F32x16 weight_scale = a.scaling == WeightScaling::kNone
                                      ? Zero()
                                      : WeightScale(a, segment, row_scales[g], weights.rows);
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) {
        const float* act_scale =
            a.act_scales == nullptr
                ? nullptr
                : a.act_scales + (token + t) * a.act_scale_stride + segment.act_scale;
        const F32x16 v = Scaled(a, acc[g][t], weight_scale, act_scale);
        float* sum = sums[g][shard * kTokens + t];
        Store(sum, first ? v : Add(Load(sum), v));
      }
    }
  }
  for (int g = 0; g < kGroups; ++g) {
    StoreSums(a, group + g, weights.rows, token, kTokens, sums[g], kTokens);
  }
}

template <typename Format, int kGroups, int kTokens>
void Groups(const GemmArgs& a, int64_t group, int64_t token, const float* x, int64_t x_stride) {
  const int64_t full = a.n / kGroupRows;
  const int64_t end = group + kTaskGroups;
  for (; group + kGroups <= end && group + kGroups <= full; group += kGroups) {
    Tile<Format, false, kGroups, kTokens>(a, group, token, x, x_stride);
  }
  for (; group < end && group < full; ++group) {
    Tile<Format, false, 1, kTokens>(a, group, token, x, x_stride);
  }
  if (group < end && group * kGroupRows < a.n) {
    Tile<Format, true, 1, kTokens>(a, group, token, x, x_stride);
  }
}

#if !defined(LOCKSTEP_ISA_AVX512)

// Sixteen registers hold too few sums to pay for weights that are decoded in between. For more rows
// of x than a handful, a stretch of K is decoded once, to memory, for all rows of the task.
constexpr int64_t kFewTokens = 4;
constexpr int64_t kPanelK = 128;

// panel[k - begin] = the weights of k.
template <bool kPartial, typename Format>
void DecodePanel(Format, const TileWeights<1>& weights, int64_t begin, int64_t end,
                 float (*panel)[16]) {
  const int64_t stride = Format::kUnitBytes * (kPartial ? weights.rows : kGroupRows);
  for (int64_t k = begin; k < end; ++k) {
    Store(panel[k - begin],
          Format::template Decode<kPartial>(weights.codes[0] + k * stride, weights.rows));
  }
}

template <bool kPartial>
void DecodePanel(Nvfp4Format, const TileWeights<1>& weights, int64_t begin, int64_t end,
                 float (*panel)[16]) {
  const int64_t rows = kPartial ? weights.rows : kGroupRows;
  for (int64_t k = begin; k < end; k += 16) {
    const F32x16 scale =
        Fp8Format::Decode<kPartial>(weights.block16_scales[0] + k / 16 * rows, weights.rows);
    for (int64_t i = k; i < k + 16; i += 2) {
      const uint8_t* p = weights.codes[0] + i / 2 * rows;
      F32x16 even, odd;
      if (kPartial) {
        LoadE2M1Lanes(p, weights.rows, &even, &odd);
      } else {
        LoadE2M1(p, &even, &odd);
      }
      Store(panel[i - begin], Mul(even, scale));
      Store(panel[i - begin + 1], Mul(odd, scale));
    }
  }
}

// acc[t] += panel[k] x[k * x_stride + t] for k in [0, count), ascending.
template <int kTokens>
void MultiplyPanel(const float (*panel)[16], int64_t count, const float* x, int64_t x_stride,
                   float (*acc)[16]) {
  F32x16 sums[1][kTokens];
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) sums[0][t] = Load(acc[t]);
  for (int64_t k = 0; k < count; ++k) {
    const F32x16 w[1] = {Load(panel[k])};
    MultiplyAdd<1, kTokens>(w, x + k * x_stride, sums);
  }
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) Store(acc[t], sums[0][t]);
}

// The same for any number of tokens of one tile. Six fill the registers; the rest goes in parts of
// three and more where it can, since one or two do not fill the pipeline.
void MultiplyPanel(const float (*panel)[16], int64_t count, const float* x, int64_t x_stride,
                   int64_t tokens, float (*acc)[16]) {
  for (int64_t t = 0; t < tokens;) {
    const int64_t left = tokens - t;
    const int64_t part = left <= 6 ? left : left <= 8 ? 4 : 6;
    constexpr decltype(&MultiplyPanel<1>) kParts[] = {MultiplyPanel<1>, MultiplyPanel<2>,
                                                      MultiplyPanel<3>, MultiplyPanel<4>,
                                                      MultiplyPanel<5>, MultiplyPanel<6>};
    kParts[part - 1](panel, count, x + t, x_stride, acc + t);
    t += part;
  }
}

// Output rows of one group for tokens [token, token + tokens); token begins a tile of x.
template <typename Format, bool kPartial>
void Panels(const GemmArgs& a, int64_t group, int64_t token, int64_t tokens) {
  const TileWeights<1> weights = WeightsOf<Format, kPartial, 1>(a, group);
  RowScales row_scales;
  if (a.scaling == WeightScaling::kChannel || a.scaling == WeightScaling::kBlock128) {
    row_scales = FindRowScales(a, group, weights.rows);
  }
  alignas(64) float panel[kPanelK][16];
  alignas(64) float acc[kTaskTokens][16];
  alignas(64) float sums[kMaxShards * kTaskTokens][16];
  int64_t shard = -1;
  for (int64_t i = 0; i < a.num_segments; ++i) {
    const KSegment& segment = a.segments[i];
    for (int64_t t = 0; t < tokens; ++t) Store(acc[t], Zero());
    for (int64_t k = segment.begin; k < segment.end; k += kPanelK) {
      const int64_t count = segment.end - k < kPanelK ? segment.end - k : kPanelK;
      DecodePanel<kPartial>(Format(), weights, k, k + count, panel);
      for (int64_t t = 0; t < tokens; t += kTileTokens) {
        const int64_t part = tokens - t < kTileTokens ? tokens - t : kTileTokens;
        MultiplyPanel(panel, count, a.x + (token + t) * a.k + k * part, part, part, acc + t);
      }
    }
    const bool first = segment.shard != shard;
    shard = segment.shard;
    const F32x16 weight_scale = a.scaling == WeightScaling::kNone
                                    ? Zero()
                                    : WeightScale(a, segment, row_scales, weights.rows);
    for (int64_t t = 0; t < tokens; ++t) {
      const float* act_scale =
          a.act_scales == nullptr
              ? nullptr
              : a.act_scales + (token + t) * a.act_scale_stride + segment.act_scale;
      const F32x16 v = Scaled(a, Load(acc[t]), weight_scale, act_scale);
      float* sum = sums[shard * tokens + t];
      Store(sum, first ? v : Add(Load(sum), v));
    }
  }
  StoreSums(a, group, weights.rows, token, tokens, sums, tokens);
}

template <typename Format>
void Task(const GemmArgs& a, int64_t group, int64_t token, int64_t tokens) {
  if (tokens > kFewTokens) {
    const int64_t end = group + kTaskGroups;
    for (; group < end && group < a.n / kGroupRows; ++group) {
      Panels<Format, false>(a, group, token, tokens);
    }
    if (group < end && group * kGroupRows < a.n) Panels<Format, true>(a, group, token, tokens);
    return;
  }
  const float* x = a.x + token * a.k;
  switch (tokens) {
    case 1:
      return Groups<Format, 2, 1>(a, group, token, x, tokens);
    case 2:
      return Groups<Format, 2, 2>(a, group, token, x, tokens);
    case 3:
      Groups<Format, 2, 2>(a, group, token, x, tokens);
      return Groups<Format, 2, 1>(a, group, token + 2, x + 2, tokens);
    default:
      return Groups<Format, 1, 4>(a, group, token, x, tokens);
  }
}

#else

template <typename Format>
void TileTask(const GemmArgs& a, int64_t group, int64_t token, int64_t tokens) {
  const float* x = a.x + token * a.k;
  for (int64_t t = 0; t < tokens;) {
    const int64_t left = tokens - t;
    if (left >= 16) {
      Groups<Format, 1, 16>(a, group, token + t, x + t, tokens);
      t += 16;
    } else if (left >= 8) {
      Groups<Format, 2, 8>(a, group, token + t, x + t, tokens);
      t += 8;
    } else if (left >= 4) {
      Groups<Format, 2, 4>(a, group, token + t, x + t, tokens);
      t += 4;
    } else if (left >= 2) {
      Groups<Format, 4, 2>(a, group, token + t, x + t, tokens);
      t += 2;
    } else {
      Groups<Format, 4, 1>(a, group, token + t, x + t, tokens);
      t += 1;
    }
  }
}

template <typename Format>
void Task(const GemmArgs& a, int64_t group, int64_t token, int64_t tokens) {
  for (int64_t t = 0; t < tokens; t += kTileTokens) {
    const int64_t left = tokens - t;
    TileTask<Format>(a, group, token + t, left < kTileTokens ? left : kTileTokens);
  }
}

#endif

}  // namespace

// Output rows of groups [group, group + kTaskGroups) for up to kTaskTokens rows of x from `token`,
// which begins a tile.
void GemmTask(const GemmArgs& a, int64_t group, int64_t token) {
  const int64_t left = a.m - token;
  const int64_t tokens = left < kTaskTokens ? left : kTaskTokens;
  switch (a.format) {
    case WeightFormat::kF32:
      return Task<F32Format>(a, group, token, tokens);
    case WeightFormat::kBF16:
      return Task<BF16Format>(a, group, token, tokens);
    case WeightFormat::kFp8:
      return Task<Fp8Format>(a, group, token, tokens);
    case WeightFormat::kNvfp4:
      return Task<Nvfp4Format>(a, group, token, tokens);
  }
}

}  // namespace LOCKSTEP_ISA
}  // namespace lockstep
