// Tests of Gemm: against a scalar statement of its order, and bit-equality over instruction sets,
// numbers of tokens, threads, and ranks that share the virtual shards.
#include "kernels/gemm/gemm.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/float_types.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/gemm/pack.h"
#include "kernels/quantize/quantize.h"
#include "kernels/runtime/cpu_isa.h"

namespace lockstep {
namespace {

using ::lockstep::testing::StatusIs;
using ::testing::HasSubstr;

struct Case {
  std::string name;
  WeightFormat format;
  WeightScaling scaling;
  int64_t n, k;
  int64_t shards;     // of the full K
  int64_t act_group;  // 0: values, not codes
  bool bf16_input = false;
  bool bf16_scales = false;
};

std::vector<Case> Cases() {
  using F = WeightFormat;
  using S = WeightScaling;
  return {
      {"f32", F::kF32, S::kNone, 37, 83, 1, 0},
      {"bf16", F::kBF16, S::kNone, 83, 96, 1, 0},
      {"bf16_rows", F::kBF16, S::kNone, 21, 256, 8, 0, true},
      {"nvfp4", F::kNvfp4, S::kTensor, 70, 96, 1, 0, true},
      {"nvfp4_rows", F::kNvfp4, S::kTensor, 40, 256, 8, 0},
      {"fp8_tensor", F::kFp8, S::kTensor, 33, 160, 1, 0},
      {"fp8_channel_rows", F::kFp8, S::kChannel, 150, 384, 8, 0, true, true},
      {"fp8_channel_w8a8", F::kFp8, S::kChannel, 70, 200, 1, 200, false, true},
      {"fp8_channel_w8a8_rows", F::kFp8, S::kChannel, 35, 384, 8, 48},
      {"fp8_block", F::kFp8, S::kBlock128, 300, 200, 1, 0, false, true},
      {"fp8_block_rows", F::kFp8, S::kBlock128, 150, 384, 8, 0},
      {"fp8_block_w8a8", F::kFp8, S::kBlock128, 150, 384, 1, 128, true, true},
      // Shards of 160: activation groups 128 + 32, weight blocks cut elsewhere.
      {"fp8_block_w8a8_rows", F::kFp8, S::kBlock128, 40, 1280, 8, 128},
  };
}

// A full weight as stored, with what is needed to evaluate it by hand and to pack parts of it.
struct Weight {
  Case c;
  std::vector<uint8_t> codes;    // rows of k (or k / 2) units
  std::vector<uint8_t> block16;  // [n, k / 16]
  std::vector<float> scales;     // channel or 128-block, BF16-representable
  float tensor_scale = 0.37f;

  explicit Weight(const Case& c_in) : c(c_in) {
    std::mt19937 rng(static_cast<uint32_t>(c.n * 1000 + c.k));
    std::normal_distribution<float> normal;
    if (c.format == WeightFormat::kNvfp4) {
      for (int64_t i = 0; i < c.n * c.k / 2; ++i) codes.push_back(static_cast<uint8_t>(rng()));
      for (int64_t i = 0; i < c.n * c.k / 16; ++i) {
        block16.push_back(static_cast<uint8_t>(rng() % 0x7f));
      }
    }
    for (int64_t i = 0; codes.size() < static_cast<size_t>(c.n * c.k * UnitBytes()) &&
                        c.format != WeightFormat::kNvfp4;
         ++i) {
      const float f = normal(rng);
      uint8_t bytes[4] = {FloatToE4M3(0.2f * f)};
      const BF16 h = ToBF16(f);
      if (c.format == WeightFormat::kF32) std::memcpy(bytes, &f, 4);
      if (c.format == WeightFormat::kBF16) std::memcpy(bytes, &h, 2);
      codes.insert(codes.end(), bytes, bytes + UnitBytes());
    }
    const int64_t count =
        c.scaling == WeightScaling::kBlock128 ? (c.n + 127) / 128 * ((c.k + 127) / 128) : c.n;
    for (int64_t i = 0; i < count; ++i) {
      scales.push_back(ToFloat(ToBF16(0.01f + std::fabs(normal(rng)))));
    }
  }
  int64_t UnitBytes() const {
    return c.format == WeightFormat::kF32 ? 4 : c.format == WeightFormat::kBF16 ? 2 : 1;
  }
  int64_t shard_size() const { return c.k / c.shards; }
  float Value(int64_t n, int64_t k) const {
    const int64_t i = n * c.k + k;
    switch (c.format) {
      case WeightFormat::kF32: {
        float f;
        std::memcpy(&f, &codes[i * 4], 4);
        return f;
      }
      case WeightFormat::kBF16: {
        BF16 h;
        std::memcpy(&h, &codes[i * 2], 2);
        return ToFloat(h);
      }
      case WeightFormat::kFp8:
        return E4M3ToFloat(codes[i]);
      case WeightFormat::kNvfp4:
        return E2M1ToFloat((codes[i / 2] >> (4 * (k % 2))) & 15) * E4M3ToFloat(block16[i / 16]);
    }
    return 0;
  }
  float Scale(int64_t n, int64_t k) const {
    if (c.scaling == WeightScaling::kTensor) return tensor_scale;
    if (c.scaling == WeightScaling::kChannel) return scales[n];
    return scales[n / 128 * ((c.k + 127) / 128) + k / 128];
  }
};

// A rank's columns of all rows.
struct Packed {
  std::vector<uint8_t> codes, block16, scales;
  GemmWeight weight;

  Packed(const Weight& w, int rank, int world) {
    const Case& c = w.c;
    const int64_t k = c.k / world, begin = rank * k;
    const int64_t per_unit = c.format == WeightFormat::kNvfp4 ? 2 : 1;
    std::vector<const uint8_t*> rows, scale_rows;
    for (int64_t n = 0; n < c.n; ++n) {
      rows.push_back(w.codes.data() + (n * c.k + begin) / per_unit * w.UnitBytes());
      scale_rows.push_back(w.block16.data() + (n * c.k + begin) / 16);
    }
    codes.resize(c.n * k / per_unit * w.UnitBytes());
    PackRows(rows, k / per_unit, static_cast<int>(w.UnitBytes()), codes.data());
    if (c.format == WeightFormat::kNvfp4) {
      block16.resize(c.n * k / 16);
      PackRows(scale_rows, k / 16, 1, block16.data());
    }
    for (float s : w.scales) {
      const BF16 h = ToBF16(s);
      const uint8_t* p = c.bf16_scales ? reinterpret_cast<const uint8_t*>(&h)
                                       : reinterpret_cast<const uint8_t*>(&s);
      scales.insert(scales.end(), p, p + (c.bf16_scales ? 2 : 4));
    }
    weight.format = c.format;
    weight.scaling = c.scaling;
    weight.n = c.n;
    weight.k = k;
    weight.codes = codes.data();
    weight.block16_scales = block16.data();
    weight.tensor_scale = w.tensor_scale;
    weight.scale_dtype = c.bf16_scales ? DType::kBF16 : DType::kF32;
    // All columns of scales are held; the first one used is that of the rank's first column.
    weight.scale_columns = (c.k + 127) / 128;
    weight.scales = scales.data();
    if (c.scaling == WeightScaling::kBlock128) {
      weight.scales = scales.data() + begin / 128 * (c.bf16_scales ? 2 : 4);
    }
    weight.block_rows = {{0, c.n, 0, 0}};
    weight.shards = c.shards / world;
    weight.segments = MakeSegments(
        {begin, k, w.shard_size(), c.scaling == WeightScaling::kBlock128, c.act_group});
  }
};

class GemmTest : public ::testing::TestWithParam<Case> {
 protected:
  GemmTest() : best_(GetCpuIsa()) { CHECK_OK(workspace_.Allocate(DeviceType::kCpu, 1 << 20)); }
  ~GemmTest() override { SetCpuIsa(best_); }

  // Values of x that suit the case: BF16-representable where the input is BF16.
  static std::vector<float> Input(const Case& c, int64_t tokens) {
    std::mt19937 rng(7);
    std::normal_distribution<float> normal;
    std::vector<float> x(tokens * c.k);
    for (float& v : x) v = c.bf16_input ? ToFloat(ToBF16(normal(rng))) : normal(rng);
    return x;
  }
  ExecContext Context(ThreadPool* pool) {
    ExecContext ctx;
    ctx.pool = pool;
    ctx.workspace = &workspace_;
    ctx.counters = &counters_;
    return ctx;
  }
  // Columns [begin, begin + k of p) of `tokens` rows of x through Gemm.
  std::vector<float> Run(const Case& c, const Packed& p, const float* x, int64_t tokens,
                         int64_t begin, ThreadPool* pool) {
    ExecContext ctx = Context(pool);
    const int64_t k = p.weight.k;
    std::vector<float> part;
    std::vector<BF16> part16;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < k; ++i) {
        part.push_back(x[t * c.k + begin + i]);
        part16.push_back(ToBF16(part.back()));
      }
    }
    std::vector<float> out(tokens * c.n, -1.0f);
    const TensorView outv(out.data(), DType::kF32, {tokens, c.n});
    const TensorView xv = c.bf16_input ? TensorView(part16.data(), DType::kBF16, {tokens, k})
                                       : TensorView(part.data(), DType::kF32, {tokens, k});
    if (c.act_group == 0) {
      CHECK_OK(Gemm(&ctx, p.weight, xv, nullptr, outv));
      return out;
    }
    const ActGroups groups{c.k / c.shards, c.act_group};
    std::vector<uint8_t> codes(tokens * k);
    std::vector<float> scales(tokens * groups.Count(k));
    const TensorView codesv(codes.data(), DType::kU8, {tokens, k});
    const TensorView scalesv(scales.data(), DType::kF32, {tokens, groups.Count(k)});
    CHECK_EQ(groups.Count(k), ActScalesPerToken(k, groups.shard_size, groups.group));
    CHECK_OK(QuantizeDynamic(&ctx, xv, ActScaleRule::kBlock128, groups, codesv, scalesv));
    const ConstTensorView act = scalesv;
    CHECK_OK(Gemm(&ctx, p.weight, codesv, &act, outv));
    return out;
  }

  const CpuIsa best_;
  Workspace workspace_;
  Counters counters_;
};

// One output, written down as the contract says it.
float Reference(const Weight& w, const float* x, int64_t n) {
  const Case& c = w.c;
  std::vector<float> shards;
  for (int64_t shard = 0; shard < c.k; shard += w.shard_size()) {
    float sum = 0.0f;
    bool first = true;
    const int64_t shard_end = shard + w.shard_size();
    for (int64_t begin = shard; begin < shard_end;) {
      int64_t end = shard_end;
      const int64_t group = c.act_group == 0 ? w.shard_size() : c.act_group;
      const int64_t group_begin = shard + (begin - shard) / group * group;
      const int64_t group_end = std::min(group_begin + group, shard_end);
      if (c.act_group != 0) end = std::min(end, group_end);
      if (c.scaling == WeightScaling::kBlock128) end = std::min(end, (begin / 128 + 1) * 128);
      float amax = 0.0f;
      for (int64_t k = group_begin; k < group_end; ++k) amax = std::max(amax, std::fabs(x[k]));
      const float act_scale = std::max(amax, 1e-10f) * (1.0f / 448.0f);
      float acc = 0.0f;
      for (int64_t k = begin; k < end; ++k) {
        const float xk = c.act_group == 0 ? x[k] : E4M3ToFloat(FloatToE4M3(x[k] / act_scale));
        acc = __builtin_fmaf(w.Value(n, k), xk, acc);
      }
      if (c.scaling != WeightScaling::kNone) {
        acc *= c.act_group == 0 ? w.Scale(n, begin) : act_scale * w.Scale(n, begin);
      }
      sum = first ? acc : sum + acc;
      first = false;
      begin = end;
    }
    shards.push_back(sum);
  }
  for (size_t width = 1; width < shards.size(); width *= 2) {
    for (size_t i = 0; i + width < shards.size(); i += 2 * width) shards[i] += shards[i + width];
  }
  return shards[0];
}

TEST_P(GemmTest, EveryArmTokenCountAndThreadCountGivesTheReferenceBits) {
  const Case& c = GetParam();
  const Weight w(c);
  const Packed p(w, 0, 1);
  const std::vector<float> x = Input(c, 64);
  ThreadPool one(1), three(3);
  std::vector<float> expected(64 * c.n);
  for (int64_t t = 0; t < 64; ++t) {
    for (int64_t n = 0; n < c.n; ++n) expected[t * c.n + n] = Reference(w, &x[t * c.k], n);
  }
  for (CpuIsa isa : {CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (!HasCpuIsa(isa)) continue;
    SetCpuIsa(isa);
    for (int64_t m : {1, 2, 3, 8, 17, 23, 64}) {
      const std::vector<float> out = Run(c, p, x.data(), m, 0, m % 2 == 0 ? &one : &three);
      ASSERT_EQ(0, std::memcmp(out.data(), expected.data(), out.size() * 4))
          << Name(isa) << ", T " << m;
    }
    // A row alone is the same as in a batch.
    const std::vector<float> alone = Run(c, p, &x[41 * c.k], 1, 0, &one);
    EXPECT_EQ(0, std::memcmp(alone.data(), &expected[41 * c.n], alone.size() * 4)) << Name(isa);
  }
}

TEST_P(GemmTest, RanksJoinToTheSameBits) {
  const Case& c = GetParam();
  const Weight w(c);
  ThreadPool pool(1);
  const std::vector<float> x = Input(c, 3);
  const std::vector<float> whole = Run(c, Packed(w, 0, 1), x.data(), 3, 0, &pool);
  for (int world = 2; world <= c.shards; world *= 2) {
    std::vector<std::vector<float>> parts;
    for (int rank = 0; rank < world; ++rank) {
      parts.push_back(Run(c, Packed(w, rank, world), x.data(), 3, rank * c.k / world, &pool));
    }
    for (int width = 1; width < world; width *= 2) {
      for (int r = 0; r + width < world; r += 2 * width) {
        for (size_t i = 0; i < whole.size(); ++i) parts[r][i] += parts[r + width][i];
      }
    }
    EXPECT_EQ(0, std::memcmp(parts[0].data(), whole.data(), whole.size() * 4)) << world;
  }
}

TEST_P(GemmTest, BF16OutputIsTheSumRoundedOnce) {
  const Case& c = GetParam();
  if (c.act_group != 0) return;
  const Weight w(c);
  const Packed p(w, 0, 1);
  ThreadPool pool(1);
  ExecContext ctx = Context(&pool);
  std::vector<float> x = Input(c, 2), sum(2 * c.n);
  std::vector<BF16> out(2 * (c.n + 3));
  const TensorView xv(x.data(), DType::kF32, {2, c.k});
  ASSERT_OK(Gemm(&ctx, p.weight, xv, nullptr, TensorView(sum.data(), DType::kF32, {2, c.n})));
  // Rows of the output may be wider than N.
  ASSERT_OK(Gemm(&ctx, p.weight, xv, nullptr,
                 TensorView(out.data(), DType::kBF16, {2, c.n + 3}).Columns(1, c.n)));
  for (int64_t t = 0; t < 2; ++t) {
    EXPECT_EQ(out[t * (c.n + 3)].bits, 0);
    EXPECT_EQ(out[t * (c.n + 3) + c.n + 1].bits, 0);
    for (int64_t n = 0; n < c.n; ++n) {
      EXPECT_EQ(out[t * (c.n + 3) + 1 + n].bits, ToBF16(sum[t * c.n + n]).bits);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, GemmTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

// Every code of the small formats decodes to its exact value on every arm.
TEST(GemmDecodeTest, EveryCode) {
  ThreadPool pool(1);
  Workspace workspace;
  ASSERT_OK(workspace.Allocate(DeviceType::kCpu, 4096));
  Counters counters;
  ExecContext ctx;
  ctx.pool = &pool;
  ctx.workspace = &workspace;
  ctx.counters = &counters;
  const CpuIsa best = GetCpuIsa();
  for (CpuIsa isa : {CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (!HasCpuIsa(isa)) continue;
    SetCpuIsa(isa);
    std::vector<uint8_t> codes(254);  // one row each; without the NaN codes
    for (int i = 0; i < 254; ++i) codes[i] = static_cast<uint8_t>(i < 127 ? i : i + 1);
    GemmWeight w;
    w.format = WeightFormat::kFp8;
    w.n = 254;
    w.k = 1;
    w.codes = codes.data();
    w.segments = MakeSegments({0, 1, 1, false, 0});
    float one = 1.0f;
    std::vector<float> out(254);
    ASSERT_OK(Gemm(&ctx, w, TensorView(&one, DType::kF32, {1, 1}), nullptr,
                   TensorView(out.data(), DType::kF32, {1, 254})));
    for (int i = 0; i < 254; ++i) EXPECT_EQ(out[i], E4M3ToFloat(codes[i])) << Name(isa) << " " << i;

    // Sixteen rows whose element 0 is each E2M1 code, under a scale of 0.5 (0x30).
    std::vector<uint8_t> nibbles(16 * 8, 0), scales(16, 0x30);
    for (int i = 0; i < 16; ++i) nibbles[i] = static_cast<uint8_t>(i);
    w.format = WeightFormat::kNvfp4;
    w.n = 16;
    w.k = 16;
    w.codes = nibbles.data();
    w.block16_scales = scales.data();
    w.segments = MakeSegments({0, 16, 16, false, 0});
    std::vector<float> x(16, 0.0f);
    x[0] = 1.0f;
    ASSERT_OK(Gemm(&ctx, w, TensorView(x.data(), DType::kF32, {1, 16}), nullptr,
                   TensorView(out.data(), DType::kF32, {1, 16})));
    for (int i = 0; i < 16; ++i) {
      EXPECT_EQ(out[i], 0.5f * E2M1ToFloat(static_cast<uint8_t>(i))) << Name(isa) << " " << i;
    }
  }
  SetCpuIsa(best);
}

TEST(GemmEntryTest, ChecksOperandsCountsAndSizes) {
  ThreadPool pool(1);
  Workspace counting;
  Counters counters;
  ExecContext ctx;
  ctx.pool = &pool;
  ctx.workspace = &counting;
  ctx.counters = &counters;
  GemmWeight w;
  w.n = 4;
  w.k = 32;
  w.segments = MakeSegments({0, 32, 32, false, 0});
  const TensorView x(nullptr, DType::kF32, {5, 32}), out(nullptr, DType::kF32, {5, 4});
  // A dry run takes the temporaries and computes nothing.
  ASSERT_OK(Gemm(&ctx, w, x, nullptr, out));
  EXPECT_EQ(counting.peak(), 5 * 32 * 4);
  EXPECT_EQ(counting.used(), 0);
  EXPECT_EQ(counters.op_launches, 1);

  const auto code = absl::StatusCode::kInvalidArgument;
  const TensorView u8(nullptr, DType::kU8, {5, 32});
  const ConstTensorView scales(TensorView(nullptr, DType::kF32, {5, 2}));
  EXPECT_THAT(Gemm(&ctx, w, TensorView(nullptr, DType::kF32, {5, 31}), nullptr, out),
              StatusIs(code, HasSubstr("x is F32[5, 31], expected [T, 32]")));
  EXPECT_THAT(Gemm(&ctx, w, x, nullptr, TensorView(nullptr, DType::kF32, {4, 4})),
              StatusIs(code, HasSubstr("out is F32[4, 4], expected [5, 4]")));
  EXPECT_THAT(Gemm(&ctx, w, u8, nullptr, out), StatusIs(code, HasSubstr("without activation")));
  EXPECT_THAT(Gemm(&ctx, w, x, &scales, out), StatusIs(code, HasSubstr("with activation")));
  EXPECT_THAT(Gemm(&ctx, w, u8, &scales, out), StatusIs(code, HasSubstr("expected F32[5, 1]")));
  w.device = DeviceType::kCuda;
  // Whether or not this build has a CUDA arm, F32 weights have none.
  EXPECT_THAT(Gemm(&ctx, w, x, nullptr, out),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("cpu: runs on the cpu")));
}

TEST(MakeSegmentsTest, CutsAtShardsBlocksAndGroups) {
  // Columns [160, 480) of a tensor: two shards of 160 with groups of 128, blocks at 256 and 384.
  const std::vector<KSegment> s = MakeSegments({160, 320, 160, true, 128});
  struct Row {
    int64_t begin, end, shard, weight_scale, act_scale;
  };
  const Row expected[] = {{0, 96, 0, 0, 0},    {96, 128, 0, 1, 0},  {128, 160, 0, 1, 1},
                          {160, 224, 1, 1, 2}, {224, 288, 1, 2, 2}, {288, 320, 1, 2, 3}};
  ASSERT_EQ(s.size(), 6u);
  for (size_t i = 0; i < s.size(); ++i) {
    EXPECT_EQ(s[i].begin, expected[i].begin) << i;
    EXPECT_EQ(s[i].end, expected[i].end) << i;
    EXPECT_EQ(s[i].shard, expected[i].shard) << i;
    EXPECT_EQ(s[i].weight_scale, expected[i].weight_scale) << i;
    EXPECT_EQ(s[i].act_scale, expected[i].act_scale) << i;
  }
}

}  // namespace
}  // namespace lockstep
