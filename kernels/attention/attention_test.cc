#include "kernels/attention/attention.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "kernels/base/hash.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/batch/testing/batch_builder.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/device_stream.h"
#include "kernels/runtime/testing/arm_test.h"

namespace lockstep {
namespace {

using testing::ArmContext;
using testing::ArmTensor;
using testing::BatchBuilder;
using testing::Chunk;
using testing::CpuArmScope;
using testing::DryRunContext;
using ::testing::HasSubstr;
using testing::RandomFloats;
using testing::Rounded;
using testing::StatusIs;
using testing::TestDevice;

constexpr int64_t kBlocks = 11;

struct Case {
  DType act;
  DType cache;
  int64_t q_heads, kv_heads, dim, rotary;
  bool gate, norm;
};

AttentionParams ToParams(const Case& c) {
  AttentionParams p;
  p.num_q_heads = c.q_heads;
  p.num_kv_heads = c.kv_heads;
  p.head_dim = c.dim;
  p.rotary_dim = c.rotary;
  p.scale = 1.0f / std::sqrt(static_cast<float>(c.dim));
  p.output_gate = c.gate;
  p.qk_norm = c.norm;
  p.norm_weight_offset = 1.0f;
  return p;
}

// The projections of one sequence, and the weights.
struct Inputs {
  Inputs(const Case& c, int64_t tokens, uint64_t seed)
      : q_width(c.q_heads * c.dim * (c.gate ? 2 : 1)),
        kv_width(c.kv_heads * c.dim),
        q(Rounded(RandomFloats(tokens * q_width, seed, 3.0f), c.act)),
        k(Rounded(RandomFloats(tokens * kv_width, seed + 1, 3.0f), c.act)),
        v(Rounded(RandomFloats(tokens * kv_width, seed + 2, 3.0f), c.act)),
        q_norm(Rounded(RandomFloats(c.dim, 31), DType::kBF16)),
        k_norm(Rounded(RandomFloats(c.dim, 32), DType::kBF16)) {
    for (int64_t i = 0; i < c.rotary / 2; ++i) {
      inv_freq.push_back(static_cast<float>(std::pow(1e4, -2.0 * double(i) / double(c.rotary))));
    }
  }
  int64_t q_width, kv_width;
  std::vector<float> q, k, v, q_norm, k_norm, inv_freq;
};

struct Cache {
  explicit Cache(const Case& c)
      : keys(c.cache, {kBlocks, c.kv_heads, kGrid, c.dim}),
        values(c.cache, {kBlocks, c.kv_heads, kGrid, c.dim}) {
    // Whatever other sequences left behind must not be seen.
    const std::vector<float> junk(static_cast<size_t>(keys.view().shape.num_elements()),
                                  std::numeric_limits<float>::quiet_NaN());
    keys.Set(junk);
    values.Set(junk);
  }
  KvCacheView view() const { return {keys.view(), values.view()}; }
  ArmTensor keys, values;
};

struct Part {
  const Inputs* inputs;
  Chunk chunk;
};

void Append(const std::vector<float>& from, int64_t width, const Chunk& c, std::vector<float>* to) {
  to->insert(to->end(), from.begin() + c.start * width, from.begin() + (c.start + c.rows) * width);
}

std::vector<std::vector<float>> Step(ArmContext* context, const Case& c,
                                     const std::vector<Part>& parts, const Cache& cache) {
  std::vector<Chunk> chunks;
  std::vector<float> q, k, v;
  const Inputs& w = *parts[0].inputs;
  for (const Part& part : parts) {
    chunks.push_back(part.chunk);
    Append(part.inputs->q, w.q_width, part.chunk, &q);
    Append(part.inputs->k, w.kv_width, part.chunk, &k);
    Append(part.inputs->v, w.kv_width, part.chunk, &v);
  }
  BatchBuilder builder(chunks);
  const int64_t tokens = builder.batch().num_tokens, out_width = c.q_heads * c.dim;
  ArmTensor q_t(c.act, {tokens, w.q_width}, q), k_t(c.act, {tokens, w.kv_width}, k);
  ArmTensor v_t(c.act, {tokens, w.kv_width}, v), q_out(c.act, {tokens, out_width});
  ArmTensor q_norm(DType::kBF16, {c.dim}, w.q_norm), k_norm(DType::kF32, {c.dim}, w.k_norm);
  ArmTensor inv_freq(DType::kF32, {c.rotary / 2}, w.inv_freq), out(c.act, {tokens, out_width});
  const AttentionParams p = ToParams(c);
  CHECK_OK(RopeAndCacheWrite(context->get(), builder.batch(), p, q_t.view(), k_t.view(), v_t.view(),
                             q_norm.view(), k_norm.view(), inv_freq.view(), cache.view(),
                             q_out.view()));
  CHECK_OK(PagedAttention(context->get(), builder.batch(), p, q_out.view(), q_t.view(),
                          cache.view(), out.view()));
  const std::vector<float> all = out.Get();
  std::vector<std::vector<float>> results;
  int64_t row = 0;
  for (const Part& part : parts) {
    results.emplace_back(all.begin() + row * out_width,
                         all.begin() + (row + part.chunk.rows) * out_width);
    row += part.chunk.rows;
  }
  return results;
}

std::vector<float> RunAlone(ArmContext* context, const Case& c, const Inputs& inputs,
                            const std::vector<int32_t>& cuts, const std::vector<int32_t>& blocks) {
  const Cache cache(c);
  std::vector<float> all;
  int32_t start = 0;
  for (int32_t rows : cuts) {
    const auto out = Step(context, c, {{&inputs, {0, start, rows, blocks}}}, cache);
    all.insert(all.end(), out[0].begin(), out[0].end());
    start += rows;
  }
  return all;
}

double RoundTo(DType dtype, double x) {
  return dtype == DType::kBF16 ? ToFloat(ToBF16(static_cast<float>(x))) : x;
}

// Norm and rotation of one head in double, rounded where the op rounds.
std::vector<double> PrepareHead(const Case& c, const float* x, const std::vector<float>& norm,
                                const std::vector<float>& inv_freq, int64_t position) {
  std::vector<double> y(x, x + c.dim);
  if (c.norm) {
    double sum = 0;
    for (double e : y) sum += e * e;
    for (int64_t i = 0; i < c.dim; ++i) {
      y[i] = RoundTo(c.act, y[i] / std::sqrt(sum / double(c.dim) + 1e-6) * (1.0 + norm[i]));
    }
  }
  for (int64_t i = 0; i < c.rotary / 2; ++i) {
    const double angle = double{static_cast<float>(position) * inv_freq[i]};
    const double a = y[i], b = y[i + c.rotary / 2];
    y[i] = RoundTo(c.act, a * std::cos(angle) - b * std::sin(angle));
    y[i + c.rotary / 2] = RoundTo(c.act, b * std::cos(angle) + a * std::sin(angle));
  }
  return y;
}

std::vector<double> Reference(const Case& c, const Inputs& in, int64_t tokens) {
  const int64_t group = c.q_heads / c.kv_heads, q_stride = c.gate ? 2 * c.dim : c.dim;
  std::vector<double> out;
  std::vector<std::vector<double>> keys;  // [token * kv_heads + head]
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < c.kv_heads; ++h) {
      keys.push_back(PrepareHead(c, &in.k[t * in.kv_width + h * c.dim], in.k_norm, in.inv_freq, t));
      for (double& e : keys.back()) e = RoundTo(c.cache, e);
    }
    for (int64_t h = 0; h < c.q_heads; ++h) {
      const float* raw = &in.q[t * in.q_width + h * q_stride];
      const auto q = PrepareHead(c, raw, in.q_norm, in.inv_freq, t);
      std::vector<double> scores, o(static_cast<size_t>(c.dim));
      double best = -1e300, sum = 0;
      for (int64_t j = 0; j <= t; ++j) {
        double s = 0;
        for (int64_t i = 0; i < c.dim; ++i) s += q[i] * keys[j * c.kv_heads + h / group][i];
        scores.push_back(s / std::sqrt(double(c.dim)));
        best = std::max(best, scores.back());
      }
      for (int64_t j = 0; j <= t; ++j) {
        const double e = std::exp(scores[j] - best);
        sum += e;
        const float* v = &in.v[j * in.kv_width + (h / group) * c.dim];
        for (int64_t i = 0; i < c.dim; ++i) o[i] += e * RoundTo(c.cache, v[i]);
      }
      for (int64_t i = 0; i < c.dim; ++i) {
        double y = RoundTo(c.act, o[i] / sum);
        if (c.gate) y = RoundTo(c.act, y / (1 + std::exp(-double{raw[c.dim + i]})));
        out.push_back(y);
      }
    }
  }
  return out;
}

class AttentionTest : public ::testing::TestWithParam<Case> {};

TEST_P(AttentionTest, MatchesSoftmaxInDouble) {
  const Case c = GetParam();
  ArmContext context;
  const Inputs inputs(c, 90, 1);
  const auto got = RunAlone(&context, c, inputs, {90}, {7, 3});
  const auto want = Reference(c, inputs, 90);
  const bool bf16 = c.act == DType::kBF16;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], bf16 ? 0.02 : 5e-5) << i;
  }
  EXPECT_EQ(context.op_launches(), 2);
}

TEST_P(AttentionTest, AnyChunkingAndAnyBlocksGiveTheSameBits) {
  const Case c = GetParam();
  const int32_t tokens = 150;
  ArmContext context;
  const Inputs inputs(c, tokens, 2);
  const auto want = RunAlone(&context, c, inputs, {tokens}, {0, 1, 2});
  EXPECT_EQ(RunAlone(&context, c, inputs, std::vector<int32_t>(tokens, 1), {9, 4, 10}), want);
  EXPECT_EQ(RunAlone(&context, c, inputs, {64, 64, 22}, {2, 0, 1}), want);
  EXPECT_EQ(RunAlone(&context, c, inputs, {1, 62, 2, 80, 5}, {5, 6, 3}), want);
}

TEST_P(AttentionTest, ArmsAgreeWithinTheirRoundings) {
  const Case c = GetParam();
  const Inputs inputs(c, 300, 8);
  const auto run = [&] {
    ArmContext context;
    return RunAlone(&context, c, inputs, {250, 50}, {7, 3, 0, 10, 1});
  };
  const auto got = run();
  const CpuArmScope cpu;
  const auto want = run();
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], c.act == DType::kBF16 ? 0.02 : 2e-5) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, AttentionTest,
    ::testing::Values(Case{DType::kF32, DType::kF32, 8, 2, 64, 16, true, true},
                      Case{DType::kF32, DType::kF32, 4, 4, 128, 128, false, false},
                      Case{DType::kBF16, DType::kBF16, 6, 1, 64, 64, true, true},
                      Case{DType::kBF16, DType::kBF16, 2, 1, 256, 64, true, true},
                      Case{DType::kBF16, DType::kBF16, 8, 2, 128, 128, false, true},
                      Case{DType::kBF16, DType::kBF16, 20, 1, 64, 16, false, false},
                      Case{DType::kF32, DType::kBF16, 3, 1, 48, 0, false, true}));

class LongAttentionTest : public ::testing::TestWithParam<Case> {};

TEST_P(LongAttentionTest, ChunksOfEverySizeGiveTheSameBits) {
  const Case c = GetParam();
  const int32_t tokens = 600;
  ArmContext context;
  const Inputs inputs(c, tokens, 6);
  const std::vector<int32_t> blocks = {4, 2, 8, 6, 0, 1, 3, 5, 7, 9};
  const auto want = RunAlone(&context, c, inputs, {tokens}, blocks);
  EXPECT_EQ(RunAlone(&context, c, inputs, std::vector<int32_t>(tokens, 1), blocks), want);
  EXPECT_EQ(RunAlone(&context, c, inputs, {255, 1, 1, 254, 2, 1, 86}, blocks), want);
  EXPECT_EQ(RunAlone(&context, c, inputs, {3, 260, 2, 100, 235}, blocks), want);
}

TEST_P(LongAttentionTest, BatchMatesOfEveryKindChangeNothing) {
  const Case c = GetParam();
  ArmContext context;
  const Inputs one(c, 300, 21), two(c, 200, 22), three(c, 66, 23);
  const auto want_one = RunAlone(&context, c, one, {300}, {0, 1, 2, 3, 4});
  const auto want_two = RunAlone(&context, c, two, {200}, {0, 1, 2, 3});
  const auto want_three = RunAlone(&context, c, three, {66}, {0, 1});
  const Cache cache(c);
  const std::vector<int32_t> blocks_one = {10, 3, 5, 0, 1}, blocks_two = {2, 4, 9, 8},
                             blocks_three = {7, 6};
  Step(&context, c,
       {{&one, {0, 0, 299, blocks_one}},
        {&two, {1, 0, 130, blocks_two}},
        {&three, {2, 0, 63, blocks_three}}},
       cache);
  // One row, a chunk, two rows.
  const auto mixed = Step(&context, c,
                          {{&one, {0, 299, 1, blocks_one}},
                           {&two, {1, 130, 69, blocks_two}},
                           {&three, {2, 63, 2, blocks_three}}},
                          cache);
  // One row each: the last of every sequence.
  const auto last = Step(&context, c,
                         {{&one, {0, 299, 1, blocks_one}},
                          {&two, {1, 199, 1, blocks_two}},
                          {&three, {2, 65, 1, blocks_three}}},
                         cache);
  const int64_t width = c.q_heads * c.dim;
  const auto rows = [&](const std::vector<float>& all, int64_t begin, int64_t count) {
    return std::vector<float>(all.begin() + begin * width, all.begin() + (begin + count) * width);
  };
  EXPECT_EQ(mixed[0], rows(want_one, 299, 1));
  EXPECT_EQ(mixed[1], rows(want_two, 130, 69));
  EXPECT_EQ(mixed[2], rows(want_three, 63, 2));
  EXPECT_EQ(last[0], rows(want_one, 299, 1));
  EXPECT_EQ(last[1], rows(want_two, 199, 1));
  EXPECT_EQ(last[2], rows(want_three, 65, 1));
}

TEST_P(LongAttentionTest, HeadsDoNotDependOnTheOtherHeadsOfTheRank) {
  const Case c = GetParam();
  if (c.kv_heads == 1) return;
  const int64_t tokens = 290, group = c.q_heads / c.kv_heads;
  Case part = c;
  part.kv_heads = 1;
  part.q_heads = group;
  const Inputs all(c, tokens, 24);
  Inputs last(part, tokens, 25);
  // The last kv head with its query heads.
  const auto columns = [&](const std::vector<float>& from, int64_t width, std::vector<float>* to) {
    const int64_t from_width = static_cast<int64_t>(from.size()) / tokens;
    for (int64_t t = 0; t < tokens; ++t) {
      std::copy(from.begin() + (t + 1) * from_width - width, from.begin() + (t + 1) * from_width,
                to->begin() + t * width);
    }
  };
  columns(all.q, last.q_width, &last.q);
  columns(all.k, last.kv_width, &last.k);
  columns(all.v, last.kv_width, &last.v);
  ArmContext context;
  for (const std::vector<int32_t>& cuts : std::vector<std::vector<int32_t>>{{290}, {289, 1}}) {
    const auto want = RunAlone(&context, c, all, cuts, {0, 1, 2, 3, 4});
    std::vector<float> want_last(static_cast<size_t>(tokens * group * c.dim));
    columns(want, group * c.dim, &want_last);
    EXPECT_EQ(RunAlone(&context, part, last, cuts, {0, 1, 2, 3, 4}), want_last);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, LongAttentionTest,
    ::testing::Values(Case{DType::kBF16, DType::kBF16, 12, 2, 256, 64, true, true},
                      Case{DType::kBF16, DType::kBF16, 8, 2, 128, 128, false, true},
                      Case{DType::kBF16, DType::kBF16, 20, 1, 64, 32, false, false},
                      Case{DType::kF32, DType::kF32, 2, 2, 32, 32, false, true}));

// A captured step works on the batch that its memory holds when it is replayed.
TEST(Attention, CapturedStepsReadTheBatchOfTheReplay) {
  if (TestDevice() == DeviceType::kCpu) return;  // nothing is captured there
  const Case c{DType::kBF16, DType::kBF16, 6, 1, 256, 64, true, true};
  ArmContext context;
  Cache cache(c);
  // Both ways begin with the same cache and write the same rows of it.
  const auto fill_cache = [&] {
    const int64_t elements = cache.keys.view().shape.num_elements();
    cache.keys.Set(RandomFloats(elements, 29));
    cache.values.Set(RandomFloats(elements, 30));
  };
  fill_cache();
  BatchBuilder batch({{0, 70, 1, {3, 1, 4, 0, 5}}, {1, 0, 3, {9}}});
  const BatchBuilder other({{0, 300, 2, {8, 2, 7, 6, 10}}, {1, 130, 2, {1, 0, 9}}});
  const Inputs inputs(c, 4, 31);
  ArmTensor q(c.act, {4, inputs.q_width}, inputs.q), k(c.act, {4, inputs.kv_width}, inputs.k);
  ArmTensor v(c.act, {4, inputs.kv_width}, inputs.v), q_out(c.act, {4, 6 * 256});
  ArmTensor norm(DType::kBF16, {c.dim}, inputs.q_norm), out(c.act, {4, 6 * 256});
  ArmTensor inv_freq(DType::kF32, {c.rotary / 2}, inputs.inv_freq);
  const auto step = [&](const ForwardBatch& b) {
    CHECK_OK(RopeAndCacheWrite(context.get(), b, ToParams(c), q.view(), k.view(), v.view(),
                               norm.view(), norm.view(), inv_freq.view(), cache.view(),
                               q_out.view()));
    CHECK_OK(PagedAttention(context.get(), b, ToParams(c), q_out.view(), q.view(), cache.view(),
                            out.view()));
  };
  step(batch.batch());
  step(other.batch());
  const std::vector<uint8_t> want = out.GetBytes();
  fill_cache();
  auto stream = DeviceStream::Create(TestDevice());
  ASSERT_OK(stream.status());
  context.get()->stream = (*stream)->handle();
  ASSERT_OK((*stream)->BeginCapture());
  step(batch.batch());
  const auto graph = (*stream)->EndCapture();
  ASSERT_OK(graph.status());
  ASSERT_OK((*stream)->Launch(*graph));
  ASSERT_OK((*stream)->Synchronize());
  EXPECT_NE(out.GetBytes(), want);
  batch.Overwrite(other);
  ASSERT_OK((*stream)->Launch(*graph));
  ASSERT_OK((*stream)->Synchronize());
  EXPECT_EQ(out.GetBytes(), want);
}

// So many heads that the partial results of all sequences do not fit: the later sequences walk
// their splits instead.
TEST(Attention, SequencesWithoutRoomForPartialsGiveTheSameBits) {
  if (TestDevice() == DeviceType::kCpu) return;  // it has one path
  const Case c{DType::kBF16, DType::kBF16, 1024, 64, 256, 0, false, false};
  constexpr int64_t kSequences = 48;
  ArmContext context(1, int64_t{160} << 20);
  Cache cache(c);
  const int64_t elements = cache.keys.view().shape.num_elements();
  cache.keys.Set(RandomFloats(elements, 26));
  cache.values.Set(RandomFloats(elements, 27));
  const int64_t width = c.q_heads * c.dim;
  const std::vector<float> q_row = RandomFloats(width, 28, 3.0f);
  std::vector<float> q_rows;
  std::vector<Chunk> chunks;
  for (int64_t b = 0; b < kSequences; ++b) {
    q_rows.insert(q_rows.end(), q_row.begin(), q_row.end());
    chunks.push_back({0, 599, 1, {3, 1, 4, 0, 5, 9, 2, 6, 8, 7}});
  }
  const auto attend = [&](const std::vector<Chunk>& batch_chunks, const std::vector<float>& q) {
    BatchBuilder builder(batch_chunks);
    const int64_t tokens = builder.batch().num_tokens;
    ArmTensor q_t(c.act, {tokens, width}, q), out(c.act, {tokens, width});
    CHECK_OK(PagedAttention(context.get(), builder.batch(), ToParams(c), q_t.view(), {},
                            cache.view(), out.view()));
    return out.GetBytes();
  };
  const std::vector<uint8_t> want = attend({chunks[0]}, q_row);
  const std::vector<uint8_t> got = attend(chunks, q_rows);
  for (int64_t b = 0; b < kSequences; ++b) {
    const auto row = got.begin() + b * static_cast<int64_t>(want.size());
    ASSERT_TRUE(std::equal(want.begin(), want.end(), row)) << b;
  }
}

TEST(Attention, BatchMatesThreadsAndInstructionSetsChangeNothing) {
  const Case c{DType::kF32, DType::kF32, 4, 2, 64, 32, true, true};
  const Inputs one(c, 140, 3), two(c, 140, 4);
  std::vector<float> want_one, want_two;
  {
    ArmContext context(1);
    want_one = RunAlone(&context, c, one, {140}, {0, 1, 2});
    want_two = RunAlone(&context, c, two, {140}, {0, 1, 2});
  }
  const CpuIsa before = GetCpuIsa();
  for (CpuIsa isa : {CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (!HasCpuIsa(isa)) continue;
    SetCpuIsa(isa);
    ArmContext context(2);
    const Cache cache(c);
    std::vector<float> got_one, got_two;
    int32_t start_one = 0, start_two = 0;
    for (const auto& rows : std::vector<std::pair<int32_t, int32_t>>{{100, 1}, {1, 99}, {39, 40}}) {
      const auto out = Step(&context, c,
                            {{&two, {0, start_two, rows.second, {8, 1, 4}}},
                             {&one, {1, start_one, rows.first, {3, 9, 2}}}},
                            cache);
      got_two.insert(got_two.end(), out[0].begin(), out[0].end());
      got_one.insert(got_one.end(), out[1].begin(), out[1].end());
      start_one += rows.first;
      start_two += rows.second;
    }
    EXPECT_EQ(got_one, want_one) << Name(isa);
    EXPECT_EQ(got_two, want_two) << Name(isa);
  }
  SetCpuIsa(before);
}

TEST(Attention, GateRowsAreInterleavedPerHead) {
  const Case c{DType::kF32, DType::kF32, 3, 1, 32, 0, true, false};
  Inputs inputs(c, 5, 5);
  ArmContext context;
  // Large gates leave the attention as it is; a zero gate halves it exactly.
  for (int64_t t = 0; t < 5; ++t) {
    for (int64_t h = 0; h < 3; ++h) {
      for (int64_t i = 0; i < 32; ++i) inputs.q[(t * 3 + h) * 64 + 32 + i] = 100.0f;
    }
  }
  const auto open = RunAlone(&context, c, inputs, {5}, {0});
  for (int64_t t = 0; t < 5; ++t) {
    for (int64_t i = 0; i < 32; ++i) inputs.q[(t * 3 + 1) * 64 + 32 + i] = 0.0f;
  }
  const auto half = RunAlone(&context, c, inputs, {5}, {0});
  for (size_t i = 0; i < open.size(); ++i) {
    const bool head_one = i / 32 % 3 == 1;
    ASSERT_EQ(half[i], head_one ? open[i] * 0.5f : open[i]);
  }
}

TEST(Attention, RefusesWrongTensorsByName) {
  const Case c{DType::kF32, DType::kF32, 4, 2, 64, 32, false, false};
  AttentionParams p = ToParams(c);
  ArmContext context;
  const Cache cache(c);
  BatchBuilder builder({{0, 60, 8, {1, 2}}});
  ArmTensor q(DType::kF32, {8, 256}), kv(DType::kF32, {8, 128}), out(DType::kF32, {8, 256});
  ArmTensor inv_freq(DType::kF32, {16});
  const auto attend = [&](const AttentionParams& params, TensorView q_view) {
    return PagedAttention(context.get(), builder.batch(), params, q_view, q_view, cache.view(),
                          out.view());
  };
  EXPECT_THAT(attend(p, kv.view()), StatusIs(absl::StatusCode::kInvalidArgument,
                                             HasSubstr("q is F32[8, 128], shape [8, 256]")));
  EXPECT_THAT(RopeAndCacheWrite(context.get(), builder.batch(), p, q.view(), kv.view(), q.view(),
                                q.view(), q.view(), inv_freq.view(), cache.view(), out.view()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("rope_and_cache_write: v is F32[8, 256]")));
  p.num_kv_heads = 3;
  EXPECT_THAT(attend(p, q.view()), StatusIs(absl::StatusCode::kInvalidArgument,
                                            HasSubstr("4 query heads over 3 kv heads")));
  p = ToParams(c);
  p.rotary_dim = 66;
  EXPECT_THAT(attend(p, q.view()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("rotary_dim is 66")));
}

// The CPU arm reads the block table before it uses it; on a device nobody does.
TEST(Attention, RefusesBlocksByNumberOnTheCpu) {
  const CpuArmScope cpu;
  const Case c{DType::kF32, DType::kF32, 4, 2, 64, 32, false, false};
  const AttentionParams p = ToParams(c);
  ArmContext context;
  const Cache cache(c);
  ArmTensor q(DType::kF32, {8, 256}), out(DType::kF32, {8, 256});
  BatchBuilder missing({{0, 60, 8, {1, -1}}});
  EXPECT_THAT(PagedAttention(context.get(), missing.batch(), p, q.view(), q.view(), cache.view(),
                             out.view()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("paged_attention: block 1 of sequence 0 is -1")));
  BatchBuilder too_long({{0, 120, 8, {1, 2}}});
  BatchBuilder beyond({{0, 124, 8, {1, 2}}});
  EXPECT_OK(PagedAttention(context.get(), too_long.batch(), p, q.view(), q.view(), cache.view(),
                           out.view()));
  EXPECT_THAT(
      PagedAttention(context.get(), beyond.batch(), p, q.view(), q.view(), cache.view(),
                     out.view()),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("sequence 0 reaches position 132")));
}

TEST(Attention, DryRunTouchesNothing) {
  const Case c{DType::kF32, DType::kF32, 4, 2, 64, 32, false, false};
  DryRunContext context;
  const Cache cache(c);
  BatchBuilder builder({{0, 0, 8, {}}});
  const TensorView q(nullptr, DType::kF32, {8, 256}, TestDevice()),
      kv(nullptr, DType::kF32, {8, 128}, TestDevice());
  const TensorView inv_freq(nullptr, DType::kF32, {16}, TestDevice());
  EXPECT_OK(RopeAndCacheWrite(context.get(), builder.batch(), ToParams(c), q, kv, kv, q, q,
                              inv_freq, cache.view(), q));
  EXPECT_OK(PagedAttention(context.get(), builder.batch(), ToParams(c), q, q, cache.view(), q));
}

}  // namespace
}  // namespace lockstep
