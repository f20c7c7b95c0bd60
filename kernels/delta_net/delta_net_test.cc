#include "kernels/delta_net/delta_net.h"

#include <cmath>

#include "gtest/gtest.h"
#include "kernels/base/hash.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/batch/testing/batch_builder.h"
#include "kernels/conv/causal_conv.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/device_stream.h"
#include "kernels/runtime/testing/arm_test.h"

namespace lockstep {
namespace {

using testing::ArmContext;
using testing::ArmTensor;
using testing::BatchBuilder;
using testing::Chunk;
using testing::DryRunContext;
using ::testing::HasSubstr;
using testing::RandomFloats;
using testing::Rounded;
using testing::Snapshot;
using testing::StatusIs;
using testing::TestDevice;

constexpr int64_t kConvWidth = 4;
constexpr int64_t kSlots = 3;
constexpr int64_t kSnapshots = 4;

DeltaNetParams MakeParams(int64_t hk, int64_t hv, int64_t dk, int64_t dv) {
  DeltaNetParams p;
  p.num_k_heads = hk;
  p.num_v_heads = hv;
  p.k_dim = dk;
  p.v_dim = dv;
  return p;
}

// Weights and the inputs of one sequence; rows are views of them.
struct Inputs {
  Inputs(const DeltaNetParams& p, DType act, int64_t tokens, uint64_t seed, float gate_scale = 1)
      : x(act, {tokens, p.conv_channels()}, RandomFloats(tokens * p.conv_channels(), seed, 2.0f)),
        z(act, {tokens, p.num_v_heads * p.v_dim},
          RandomFloats(tokens * p.num_v_heads * p.v_dim, seed + 1, 2.0f)),
        b(act, {tokens, p.num_v_heads}, RandomFloats(tokens * p.num_v_heads, seed + 2, 2.0f)),
        a(act, {tokens, p.num_v_heads}, RandomFloats(tokens * p.num_v_heads, seed + 3, 2.0f)),
        conv_weight(DType::kF32, {p.conv_channels(), kConvWidth},
                    RandomFloats(p.conv_channels() * kConvWidth, 101)),
        a_log(DType::kF32, {p.num_v_heads},
              RandomFloats(p.num_v_heads, 102, gate_scale == 1 ? 1.0f : 0.0f)),
        dt_bias(DType::kBF16, {p.num_v_heads}, RandomFloats(p.num_v_heads, 103)),
        norm(DType::kF32, {p.v_dim}, RandomFloats(p.v_dim, 104)) {
    if (gate_scale != 1) {
      a_log.Set(std::vector<float>(static_cast<size_t>(p.num_v_heads), std::log(gate_scale)));
    }
  }
  ArmTensor x, z, b, a, conv_weight, a_log, dt_bias, norm;
};

struct Caches {
  Caches(const DeltaNetParams& p, DType act, int64_t slots = kSlots)
      : conv(act, {slots, kConvWidth - 1, p.conv_channels()}),
        state(DType::kF32, {slots, p.num_v_heads, p.v_dim, p.k_dim}),
        ring_k(DType::kF32, {slots, kGrid, p.num_k_heads * p.k_dim}),
        ring_d(DType::kF32, {slots, kGrid, p.num_v_heads * p.v_dim}),
        ring_g(DType::kF32, {slots, kGrid, p.num_v_heads}),
        conv_snapshot(act, {kSnapshots, kConvWidth - 1, p.conv_channels()}),
        state_snapshot(DType::kF32, {kSnapshots, p.num_v_heads, p.v_dim, p.k_dim}) {
    // A slot that another sequence used: nothing of it may be seen.
    for (ArmTensor* t : {&conv, &state, &ring_k, &ring_d, &ring_g}) {
      t->Set(std::vector<float>(static_cast<size_t>(t->view().shape.num_elements()), 1e9f));
    }
  }
  DeltaNetState view() const {
    return {state.view(), ring_k.view(), ring_d.view(), ring_g.view(), state_snapshot.view()};
  }
  ConvState conv_view() const { return {conv.view(), conv_snapshot.view()}; }
  ArmTensor conv, state, ring_k, ring_d, ring_g, conv_snapshot, state_snapshot;
};

std::vector<float> RowsOf(const ArmTensor& t, int64_t begin, int64_t count) {
  const std::vector<float> all = t.Get();
  const int64_t width = t.view().RowElements();
  return {all.begin() + begin * width, all.begin() + (begin + count) * width};
}

// Runs one step over chunks of several sequences; gives the rows of each.
struct Part {
  const Inputs* inputs;
  Chunk chunk;
};

std::vector<std::vector<float>> Step(ArmContext* context, const DeltaNetParams& p, DType act,
                                     const std::vector<Part>& parts, const Caches& caches,
                                     const std::vector<Snapshot>& snapshots = {}) {
  std::vector<Chunk> chunks;
  std::vector<float> x, z, b, a;
  for (const Part& part : parts) {
    chunks.push_back(part.chunk);
    const Chunk& c = part.chunk;
    for (auto& pair : {std::make_pair(&part.inputs->x, &x), std::make_pair(&part.inputs->z, &z),
                       std::make_pair(&part.inputs->b, &b), std::make_pair(&part.inputs->a, &a)}) {
      const std::vector<float> rows = RowsOf(*pair.first, c.start, c.rows);
      pair.second->insert(pair.second->end(), rows.begin(), rows.end());
    }
  }
  BatchBuilder builder(chunks, snapshots);
  const int64_t tokens = builder.batch().num_tokens, width = p.num_v_heads * p.v_dim;
  ArmTensor x_t(act, {tokens, p.conv_channels()}, x), y(act, {tokens, p.conv_channels()});
  ArmTensor z_t(act, {tokens, width}, z), out(act, {tokens, width});
  ArmTensor b_t(act, {tokens, p.num_v_heads}, b), a_t(act, {tokens, p.num_v_heads}, a);
  const Inputs& w = *parts[0].inputs;
  CHECK_OK(CausalConv(context->get(), builder.batch(), x_t.view(), w.conv_weight.view(), {},
                      caches.conv_view(), y.view()));
  CHECK_OK(GatedDeltaNet(context->get(), builder.batch(), p, y.view(), z_t.view(), b_t.view(),
                         a_t.view(), w.a_log.view(), w.dt_bias.view(), w.norm.view(), caches.view(),
                         out.view()));
  std::vector<std::vector<float>> results;
  int64_t row = 0;
  for (const Part& part : parts) {
    results.push_back(RowsOf(out, row, part.chunk.rows));
    row += part.chunk.rows;
  }
  return results;
}

std::vector<float> RunAlone(ArmContext* context, const DeltaNetParams& p, DType act,
                            const Inputs& inputs, const std::vector<int32_t>& cuts,
                            const Caches& caches) {
  std::vector<float> all;
  int32_t start = 0;
  for (int32_t rows : cuts) {
    const auto out = Step(context, p, act, {{&inputs, {1, start, rows, {}}}}, caches);
    all.insert(all.end(), out[0].begin(), out[0].end());
    start += rows;
  }
  return all;
}

// The recurrence in double, convolution included.
std::vector<double> Reference(const DeltaNetParams& p, const Inputs& in, int64_t tokens,
                              DType act) {
  const auto x = in.x.Get(), z = in.z.Get(), b = in.b.Get(), a = in.a.Get();
  const auto cw = in.conv_weight.Get(), a_log = in.a_log.Get(), dt = in.dt_bias.Get();
  const auto norm = in.norm.Get();
  const int64_t c = p.conv_channels(), hk = p.num_k_heads, hv = p.num_v_heads;
  const int64_t dk = p.k_dim, dv = p.v_dim, w = kConvWidth;
  std::vector<double> state(static_cast<size_t>(hv * dv * dk)), out;
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<double> y(static_cast<size_t>(c));
    for (int64_t i = 0; i < c; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < w; ++j) {
        const int64_t s = t - (w - 1) + j;
        if (s >= 0) sum += double{cw[i * w + j]} * x[s * c + i];
      }
      const float rounded = static_cast<float>(sum / (1 + std::exp(-sum)));
      y[i] = act == DType::kBF16 ? ToFloat(ToBF16(rounded)) : sum / (1 + std::exp(-sum));
    }
    for (int64_t h = 0; h < hv; ++h) {
      const double* q = &y[(h / (hv / hk)) * dk];
      const double* k = &y[(hk + h / (hv / hk)) * dk];
      const double* v = &y[2 * hk * dk + h * dv];
      double qq = 1e-6, kk = 1e-6;
      for (int64_t i = 0; i < dk; ++i) qq += q[i] * q[i], kk += k[i] * k[i];
      const double q_scale = 1 / std::sqrt(qq) / std::sqrt(double(dk)), k_scale = 1 / std::sqrt(kk);
      const double beta = 1 / (1 + std::exp(-double{b[t * hv + h]}));
      const double g =
          -std::exp(double{a_log[h]}) * std::log1p(std::exp(double{a[t * hv + h]} + dt[h]));
      std::vector<double> o(static_cast<size_t>(dv));
      double squares = 0;
      for (int64_t r = 0; r < dv; ++r) {
        double* row = &state[(h * dv + r) * dk];
        double sk = 0;
        for (int64_t i = 0; i < dk; ++i) row[i] *= std::exp(g), sk += row[i] * k[i] * k_scale;
        const double d = beta * (v[r] - sk);
        for (int64_t i = 0; i < dk; ++i) {
          row[i] += d * k[i] * k_scale;
          o[r] += row[i] * q[i] * q_scale;
        }
        squares += o[r] * o[r];
      }
      for (int64_t r = 0; r < dv; ++r) {
        const double zz = z[(t * hv + h) * dv + r], sigmoid = 1 / (1 + std::exp(-zz));
        const double gate = p.output_gate == OutputGate::kSilu ? zz * sigmoid : sigmoid;
        out.push_back(o[r] / std::sqrt(squares / double(dv) + p.norm_eps) * norm[r] * gate);
      }
    }
  }
  return out;
}

double WorstError(const std::vector<float>& got, const std::vector<double>& want) {
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double error = std::fabs(got[i] - want[i]) / (1 + std::fabs(want[i]));
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

std::vector<int32_t> RandomCuts(int32_t total, uint64_t seed) {
  std::vector<int32_t> cuts;
  for (uint64_t i = 0; total > 0; ++i) {
    const int32_t rows =
        std::min<int32_t>(total, 1 + static_cast<int32_t>(Mix64(seed * 1000 + i) % 90));
    cuts.push_back(i % 3 == 0 ? std::min(rows, 2) : rows);
    total -= cuts.back();
  }
  return cuts;
}

struct Dims {
  int64_t hk, hv, dk, dv;
};

class DeltaNetTest : public ::testing::TestWithParam<Dims> {
 protected:
  DeltaNetParams params() const {
    return MakeParams(GetParam().hk, GetParam().hv, GetParam().dk, GetParam().dv);
  }
};

TEST_P(DeltaNetTest, MatchesTheRecurrenceInDouble) {
  const DeltaNetParams p = params();
  const int32_t tokens = 150;
  ArmContext context;
  const Inputs inputs(p, DType::kF32, tokens, 11);
  const Caches caches(p, DType::kF32);
  const auto got = RunAlone(&context, p, DType::kF32, inputs, {tokens}, caches);
  EXPECT_LT(WorstError(got, Reference(p, inputs, tokens, DType::kF32)), 2e-5);
  EXPECT_EQ(context.op_launches(), 2);
}

TEST_P(DeltaNetTest, AnyChunkingGivesTheSameBits) {
  const DeltaNetParams p = params();
  const int32_t tokens = 140;
  for (DType act : {DType::kF32, DType::kBF16}) {
    ArmContext context;
    const Inputs inputs(p, act, tokens, 12);
    const Caches whole(p, act);
    const auto want = RunAlone(&context, p, act, inputs, {tokens}, whole);
    std::vector<std::vector<int32_t>> all_cuts = {std::vector<int32_t>(tokens, 1), {64, 64, 12}};
    for (uint64_t seed = 0; seed < 4; ++seed) all_cuts.push_back(RandomCuts(tokens, seed));
    for (const auto& cuts : all_cuts) {
      const Caches caches(p, act);
      ASSERT_EQ(RunAlone(&context, p, act, inputs, cuts, caches), want);
      EXPECT_EQ(caches.conv.view().Rows(1, 1).bytes(), whole.conv.view().Rows(1, 1).bytes());
      EXPECT_EQ(caches.conv.GetBytes(), whole.conv.GetBytes());
      EXPECT_EQ(caches.state.GetBytes(), whole.state.GetBytes());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dims, DeltaNetTest,
                         ::testing::Values(Dims{4, 8, 32, 32}, Dims{2, 4, 16, 32},
                                           Dims{1, 3, 32, 16}, Dims{2, 2, 64, 48},
                                           Dims{1, 2, 128, 128}, Dims{1, 1, 256, 256}));

TEST(DeltaNet, Bf16StaysNearTheRecurrence) {
  const DeltaNetParams p = MakeParams(2, 4, 32, 32);
  ArmContext context;
  const Inputs inputs(p, DType::kBF16, 100, 13);
  const Caches caches(p, DType::kBF16);
  const auto got = RunAlone(&context, p, DType::kBF16, inputs, {100}, caches);
  // One rounding of the result to BF16, and roundings of the convolution that tip the other way.
  EXPECT_LT(WorstError(got, Reference(p, inputs, 100, DType::kBF16)), 2e-2);
}

TEST(DeltaNet, BatchMatesAndInstructionSetsChangeNothing) {
  const DeltaNetParams p = MakeParams(2, 6, 32, 16);
  const Inputs one(p, DType::kF32, 200, 14), two(p, DType::kF32, 200, 15);
  std::vector<float> want_one, want_two;
  {
    ArmContext context(1);
    want_one = RunAlone(&context, p, DType::kF32, one, {200}, Caches(p, DType::kF32));
    want_two = RunAlone(&context, p, DType::kF32, two, {200}, Caches(p, DType::kF32));
  }
  const CpuIsa before = GetCpuIsa();
  for (CpuIsa isa : {CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (!HasCpuIsa(isa)) continue;
    SetCpuIsa(isa);
    ArmContext context(2);
    const Caches caches(p, DType::kF32);
    std::vector<float> got_one, got_two;
    for (const auto& rows :
         std::vector<std::pair<int32_t, int32_t>>{{7, 1}, {1, 100}, {120, 1}, {1, 27}, {71, 71}}) {
      const int32_t start_one = static_cast<int32_t>(got_one.size()) / 96;
      const int32_t start_two = static_cast<int32_t>(got_two.size()) / 96;
      const auto out =
          Step(&context, p, DType::kF32,
               {{&two, {2, start_two, rows.second, {}}}, {&one, {0, start_one, rows.first, {}}}},
               caches);
      got_two.insert(got_two.end(), out[0].begin(), out[0].end());
      got_one.insert(got_one.end(), out[1].begin(), out[1].end());
    }
    EXPECT_EQ(got_one, want_one);
    EXPECT_EQ(got_two, want_two);
  }
  SetCpuIsa(before);
}

// So many heads in one step that a device need not cut them, at every place of the grid cell.
TEST(DeltaNet, RowsDoNotDependOnTheNumberOfSequences) {
  for (const DeltaNetParams& p : {MakeParams(2, 4, 128, 128), MakeParams(1, 4, 16, 48)}) {
    constexpr int32_t kTokens = 131, kSequences = 72;
    ArmContext context;
    const Inputs inputs(p, DType::kBF16, kTokens, 21);
    const auto want =
        RunAlone(&context, p, DType::kBF16, inputs, {kTokens}, Caches(p, DType::kBF16));
    const Caches caches(p, DType::kBF16, kSequences);
    std::vector<Part> prefixes, rows;
    for (int32_t b = 0; b < kSequences; ++b) {
      const int32_t length = b * 65 % (kTokens - 1);
      if (length > 0) prefixes.push_back({&inputs, {b, 0, length, {}}});
      rows.push_back({&inputs, {b, length, 1, {}}});
    }
    Step(&context, p, DType::kBF16, prefixes, caches);
    const auto got = Step(&context, p, DType::kBF16, rows, caches);
    for (Part& row : rows) ++row.chunk.start;
    const auto next = Step(&context, p, DType::kBF16, rows, caches);
    const int64_t width = p.num_v_heads * p.v_dim;
    for (int32_t b = 0; b < kSequences; ++b) {
      const auto row = want.begin() + (rows[b].chunk.start - 1) * width;
      ASSERT_EQ(got[b], std::vector<float>(row, row + width)) << b;
      ASSERT_EQ(next[b], std::vector<float>(row + width, row + 2 * width)) << b;
    }
  }
}

// A captured step works on the batch that its memory holds when it is replayed.
TEST(DeltaNet, CapturedStepsReadTheBatchOfTheReplay) {
  if (TestDevice() == DeviceType::kCpu) return;  // nothing is captured there
  const DeltaNetParams p = MakeParams(1, 2, 32, 48);
  ArmContext context;
  const Inputs inputs(p, DType::kBF16, 70, 22);
  const Caches caches(p, DType::kBF16);
  BatchBuilder batch({{0, 0, 1, {}}, {1, 0, 69, {}}});
  const BatchBuilder other({{2, 0, 66, {}}, {0, 0, 4, {}}});
  ArmTensor y(DType::kBF16, {70, p.conv_channels()}), out(DType::kBF16, {70, 96});
  const auto step = [&](const ForwardBatch& b) {
    CHECK_OK(CausalConv(context.get(), b, inputs.x.view(), inputs.conv_weight.view(), {},
                        caches.conv_view(), y.view()));
    CHECK_OK(GatedDeltaNet(context.get(), b, p, y.view(), inputs.z.view(), inputs.b.view(),
                           inputs.a.view(), inputs.a_log.view(), inputs.dt_bias.view(),
                           inputs.norm.view(), caches.view(), out.view()));
  };
  step(other.batch());
  const std::vector<uint8_t> want = out.GetBytes();
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

TEST(DeltaNet, RestoredSnapshotsContinueBitForBit) {
  const DeltaNetParams p = MakeParams(2, 4, 16, 32);
  for (DType act : {DType::kF32, DType::kBF16}) {
    ArmContext context;
    const Inputs inputs(p, act, 200, 16);
    const Caches caches(p, act);
    std::vector<float> want;
    // The grid points 64 and 128 are crossed by chunks whose last raw inputs lie partly, wholly or
    // not at all before the chunk.
    int32_t start = 0;
    for (int32_t rows : {63, 2, 61, 1, 1, 72}) {
      std::vector<Snapshot> snapshots;
      for (int32_t point : {64, 128, 192}) {
        if (start < point && point <= start + rows) snapshots.push_back({0, point, point / 64});
      }
      const auto out = Step(&context, p, act, {{&inputs, {1, start, rows, {}}}}, caches, snapshots);
      want.insert(want.end(), out[0].begin(), out[0].end());
      start += rows;
    }
    ASSERT_EQ(start, 200);
    const int64_t width = p.num_v_heads * p.v_dim;
    for (int32_t point : {64, 128, 192}) {
      Caches fresh(p, act);
      const auto restore = [point](const ArmTensor& snapshot, ArmTensor* live) {
        std::vector<float> values = live->Get();
        const std::vector<float> saved = RowsOf(snapshot, point / 64, 1);
        std::copy(saved.begin(), saved.end(), values.begin() + 2 * live->view().RowElements());
        live->Set(values);
      };
      restore(caches.conv_snapshot, &fresh.conv);
      restore(caches.state_snapshot, &fresh.state);
      const auto out = Step(&context, p, act, {{&inputs, {2, point, 200 - point, {}}}}, fresh);
      EXPECT_EQ(out[0], std::vector<float>(want.begin() + point * width, want.end())) << point;
    }
  }
}

TEST(DeltaNet, HeadsDoNotDependOnTheOtherHeadsOfTheRank) {
  const DeltaNetParams p = MakeParams(2, 4, 32, 16), half = MakeParams(1, 2, 32, 16);
  const int32_t tokens = 80;
  ArmContext context;
  const Inputs inputs(p, DType::kF32, tokens, 17);
  const auto want = RunAlone(&context, p, DType::kF32, inputs, {tokens}, Caches(p, DType::kF32));
  Inputs part(half, DType::kF32, tokens, 18);
  // The second key head with its two value heads.
  const auto columns = [&](const ArmTensor& from, std::vector<std::pair<int64_t, int64_t>> ranges,
                           ArmTensor* to) {
    const std::vector<float> all = from.Get();
    const int64_t width = from.view().RowElements();
    std::vector<float> out;
    for (int64_t t = 0; t < from.view().shape[0]; ++t) {
      for (const auto& r : ranges) {
        out.insert(out.end(), all.begin() + t * width + r.first,
                   all.begin() + t * width + r.first + r.second);
      }
    }
    to->Set(out);
  };
  columns(inputs.x, {{32, 32}, {96, 32}, {160, 32}}, &part.x);
  columns(inputs.z, {{32, 32}}, &part.z);
  columns(inputs.b, {{2, 2}}, &part.b);
  columns(inputs.a, {{2, 2}}, &part.a);
  const std::vector<float> conv = inputs.conv_weight.Get();
  std::vector<float> conv_part;
  for (int64_t begin : {32, 96, 160}) {
    conv_part.insert(conv_part.end(), conv.begin() + begin * 4, conv.begin() + (begin + 32) * 4);
  }
  part.conv_weight.Set(conv_part);
  part.a_log.Set(RowsOf(inputs.a_log, 2, 2));
  part.dt_bias.Set(RowsOf(inputs.dt_bias, 2, 2));
  const auto got = RunAlone(&context, half, DType::kF32, part, {tokens}, Caches(half, DType::kF32));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < 32; ++i) ASSERT_EQ(got[t * 32 + i], want[t * 64 + 32 + i]);
  }
}

TEST(DeltaNet, StrongDecayStaysFiniteAndRight) {
  DeltaNetParams p = MakeParams(1, 2, 16, 16);
  p.output_gate = OutputGate::kSigmoid;
  ArmContext context;
  Inputs inputs(p, DType::kF32, 130, 19, 50.0f);
  inputs.a.Set(std::vector<float>(130 * 2, 1.0f));
  const auto got = RunAlone(&context, p, DType::kF32, inputs, {130}, Caches(p, DType::kF32));
  EXPECT_LT(WorstError(got, Reference(p, inputs, 130, DType::kF32)), 1e-4);
}

TEST(DeltaNet, RefusesWrongTensorsByName) {
  const DeltaNetParams p = MakeParams(1, 2, 16, 16);
  ArmContext context;
  const Inputs inputs(p, DType::kF32, 2, 20);
  const Caches caches(p, DType::kF32);
  BatchBuilder builder({{0, 0, 2, {}}});
  ArmTensor out(DType::kF32, {2, 32});
  const auto net = [&](const DeltaNetParams& params, TensorView z) {
    return GatedDeltaNet(context.get(), builder.batch(), params, inputs.x.view(), z,
                         inputs.b.view(), inputs.a.view(), inputs.a_log.view(),
                         inputs.dt_bias.view(), inputs.norm.view(), caches.view(), out.view());
  };
  EXPECT_THAT(net(p, inputs.x.view()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("gated_delta_net: z is F32[2, 64], shape [2, 32] is needed")));
  EXPECT_THAT(
      net(MakeParams(2, 3, 16, 16), inputs.z.view()),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("3 value heads over 2 key heads")));
  EXPECT_THAT(net(MakeParams(1, 2, 24, 16), inputs.z.view()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("24 (keys)")));
}

TEST(DeltaNet, DryRunTouchesNothing) {
  const DeltaNetParams p = MakeParams(1, 2, 16, 16);
  DryRunContext context;
  const Caches caches(p, DType::kF32);
  BatchBuilder builder({{0, 0, 2, {}}});
  const TensorView x(nullptr, DType::kF32, {2, 64}, TestDevice());
  const TensorView z(nullptr, DType::kF32, {2, 32}, TestDevice()),
      b(nullptr, DType::kF32, {2, 2}, TestDevice());
  const TensorView h(nullptr, DType::kF32, {2}, TestDevice()),
      n(nullptr, DType::kF32, {16}, TestDevice());
  EXPECT_OK(
      GatedDeltaNet(context.get(), builder.batch(), p, x, z, b, b, h, h, n, caches.view(), z));
}

}  // namespace
}  // namespace lockstep
