#include "kernels/mamba2/mamba2.h"

#include <algorithm>
#include <cmath>

#include "gtest/gtest.h"
#include "kernels/base/hash.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/batch/testing/batch_builder.h"
#include "kernels/runtime/cpu_isa.h"
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
using testing::Snapshot;
using testing::StatusIs;

constexpr int64_t kSlots = 3;
constexpr int64_t kSnapshots = 4;

Mamba2Params MakeParams(int64_t heads, int64_t groups, int64_t head_dim, int64_t state_dim) {
  Mamba2Params p;
  p.num_heads = heads;
  p.num_groups = groups;
  p.head_dim = head_dim;
  p.state_dim = state_dim;
  return p;
}

// Weights and the inputs of one sequence.
struct Inputs {
  Inputs(const Mamba2Params& p, DType act, int64_t tokens, uint64_t seed)
      : xbc(act, {tokens, p.conv_channels()}, RandomFloats(tokens * p.conv_channels(), seed)),
        z(act, {tokens, p.inner()}, RandomFloats(tokens * p.inner(), seed + 1, 2.0f)),
        dt(act, {tokens, p.num_heads}, RandomFloats(tokens * p.num_heads, seed + 2, 2.0f)),
        a_log(DType::kF32, {p.num_heads}, RandomFloats(p.num_heads, 102)),
        d(DType::kBF16, {p.num_heads}, RandomFloats(p.num_heads, 103)),
        dt_bias(DType::kF32, {p.num_heads}, RandomFloats(p.num_heads, 104, 2.0f)),
        norm(DType::kBF16, {p.inner()}, RandomFloats(p.inner(), 105)) {}
  Mamba2Weights weights() const { return {a_log.view(), d.view(), dt_bias.view(), norm.view()}; }
  ArmTensor xbc, z, dt, a_log, d, dt_bias, norm;
};

struct Caches {
  explicit Caches(const Mamba2Params& p)
      : state(DType::kF32, {kSlots, p.num_heads, p.head_dim, p.state_dim}),
        ring_x(DType::kF32, {kSlots, kGrid, p.inner()}),
        ring_b(DType::kF32, {kSlots, kGrid, p.num_groups * p.state_dim}),
        ring_g(DType::kF32, {kSlots, kGrid, p.num_heads}),
        state_snapshot(DType::kF32, {kSnapshots, p.num_heads, p.head_dim, p.state_dim}) {
    // A slot that another sequence used: nothing of it may be seen.
    for (ArmTensor* t : {&state, &ring_x, &ring_b, &ring_g}) {
      t->Set(std::vector<float>(static_cast<size_t>(t->view().shape.num_elements()), 1e9f));
    }
  }
  Mamba2State view() const {
    return {state.view(), ring_x.view(), ring_b.view(), ring_g.view(), state_snapshot.view()};
  }
  ArmTensor state, ring_x, ring_b, ring_g, state_snapshot;
};

std::vector<float> RowsOf(const ArmTensor& t, int64_t begin, int64_t count) {
  const std::vector<float> all = t.Get();
  const int64_t width = t.view().RowElements();
  return {all.begin() + begin * width, all.begin() + (begin + count) * width};
}

struct Part {
  const Inputs* inputs;
  Chunk chunk;
};

// Runs one step over chunks of several sequences; gives the rows of each.
std::vector<std::vector<float>> Step(ArmContext* context, const Mamba2Params& p, DType act,
                                     const std::vector<Part>& parts, const Caches& caches,
                                     const std::vector<Snapshot>& snapshots = {}) {
  std::vector<Chunk> chunks;
  std::vector<float> xbc, z, dt;
  for (const Part& part : parts) {
    chunks.push_back(part.chunk);
    for (auto& pair : {std::make_pair(&part.inputs->xbc, &xbc), std::make_pair(&part.inputs->z, &z),
                       std::make_pair(&part.inputs->dt, &dt)}) {
      const std::vector<float> rows = RowsOf(*pair.first, part.chunk.start, part.chunk.rows);
      pair.second->insert(pair.second->end(), rows.begin(), rows.end());
    }
  }
  BatchBuilder builder(chunks, snapshots);
  const int64_t tokens = builder.batch().num_tokens;
  ArmTensor xbc_t(act, {tokens, p.conv_channels()}, xbc), z_t(act, {tokens, p.inner()}, z);
  ArmTensor dt_t(act, {tokens, p.num_heads}, dt), out(act, {tokens, p.inner()});
  CHECK_OK(Mamba2(context->get(), builder.batch(), p, xbc_t.view(), z_t.view(), dt_t.view(),
                  parts[0].inputs->weights(), caches.view(), out.view()));
  std::vector<std::vector<float>> results;
  int64_t row = 0;
  for (const Part& part : parts) {
    results.push_back(RowsOf(out, row, part.chunk.rows));
    row += part.chunk.rows;
  }
  return results;
}

std::vector<float> RunAlone(ArmContext* context, const Mamba2Params& p, DType act,
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

// The recurrence in double.
std::vector<double> Reference(const Mamba2Params& p, const Inputs& in, int64_t tokens) {
  const auto xbc = in.xbc.Get(), z = in.z.Get(), dt = in.dt.Get(), a_log = in.a_log.Get();
  const auto d = in.d.Get(), dt_bias = in.dt_bias.Get(), norm = in.norm.Get();
  const int64_t nh = p.num_heads, dim = p.head_dim, n = p.state_dim, inner = p.inner();
  const int64_t per_group = nh / p.num_groups, width = per_group * dim;
  std::vector<double> state(static_cast<size_t>(nh * dim * n)), out;
  for (int64_t t = 0; t < tokens; ++t) {
    const float* row = &xbc[t * p.conv_channels()];
    std::vector<double> gated(static_cast<size_t>(inner));
    for (int64_t h = 0; h < nh; ++h) {
      const float* b = row + inner + h / per_group * n;
      const float* c = b + p.num_groups * n;
      const double delta = std::log1p(std::exp(double{dt[t * nh + h]} + dt_bias[h]));
      const double decay = std::exp(-std::exp(double{a_log[h]}) * delta);
      for (int64_t i = 0; i < dim; ++i) {
        const double x = row[h * dim + i];
        double y = d[h] * x;
        for (int64_t k = 0; k < n; ++k) {
          double& s = state[(h * dim + i) * n + k];
          s = s * decay + delta * x * b[k];
          y += s * c[k];
        }
        const double gate = z[t * inner + h * dim + i];
        gated[h * dim + i] = y * gate / (1 + std::exp(-gate));
      }
    }
    for (int64_t g = 0; g < p.num_groups; ++g) {
      double squares = 0;
      for (int64_t i = g * width; i < (g + 1) * width; ++i) squares += gated[i] * gated[i];
      const double rms = std::sqrt(squares / double(width) + p.norm_eps);
      for (int64_t i = g * width; i < (g + 1) * width; ++i) {
        out.push_back(gated[i] / rms * norm[i]);
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
    const int32_t rows = 1 + static_cast<int32_t>(Mix64(seed * 1000 + i) % 90);
    cuts.push_back(std::min(total, i % 3 == 0 ? std::min(rows, 2) : rows));
    total -= cuts.back();
  }
  return cuts;
}

struct Dims {
  int64_t heads, groups, head_dim, state_dim;
};

class Mamba2Test : public ::testing::TestWithParam<Dims> {
 protected:
  Mamba2Params params() const {
    const Dims& d = GetParam();
    return MakeParams(d.heads, d.groups, d.head_dim, d.state_dim);
  }
};

TEST_P(Mamba2Test, MatchesTheRecurrenceInDouble) {
  const Mamba2Params p = params();
  const int32_t tokens = 150;
  ArmContext context;
  const Inputs inputs(p, DType::kF32, tokens, 11);
  const auto got = RunAlone(&context, p, DType::kF32, inputs, {tokens}, Caches(p));
  EXPECT_LT(WorstError(got, Reference(p, inputs, tokens)), 2e-5);
  EXPECT_EQ(context.op_launches(), 1);
}

TEST_P(Mamba2Test, AnyChunkingGivesTheSameBits) {
  const Mamba2Params p = params();
  const int32_t tokens = 140;
  for (DType act : {DType::kF32, DType::kBF16}) {
    ArmContext context;
    const Inputs inputs(p, act, tokens, 12);
    const Caches whole(p);
    const auto want = RunAlone(&context, p, act, inputs, {tokens}, whole);
    std::vector<std::vector<int32_t>> all_cuts = {std::vector<int32_t>(tokens, 1), {64, 64, 12}};
    for (uint64_t seed = 0; seed < 4; ++seed) all_cuts.push_back(RandomCuts(tokens, seed));
    for (const auto& cuts : all_cuts) {
      const Caches caches(p);
      ASSERT_EQ(RunAlone(&context, p, act, inputs, cuts, caches), want);
      EXPECT_EQ(caches.state.GetBytes(), whole.state.GetBytes());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dims, Mamba2Test,
                         ::testing::Values(Dims{8, 4, 16, 32}, Dims{4, 2, 32, 16},
                                           Dims{3, 1, 16, 48}, Dims{2, 2, 80, 16}));

TEST(Mamba2, Bf16StaysNearTheRecurrence) {
  const Mamba2Params p = MakeParams(4, 2, 16, 32);
  ArmContext context;
  const Inputs inputs(p, DType::kBF16, 100, 13);
  const auto got = RunAlone(&context, p, DType::kBF16, inputs, {100}, Caches(p));
  // One rounding of the result to BF16.
  EXPECT_LT(WorstError(got, Reference(p, inputs, 100)), 4e-3);
}

TEST(Mamba2, BatchMatesAndInstructionSetsChangeNothing) {
  const Mamba2Params p = MakeParams(6, 2, 16, 32);
  const Inputs one(p, DType::kF32, 200, 14), two(p, DType::kF32, 200, 15);
  std::vector<float> want_one, want_two;
  {
    ArmContext context(1);
    want_one = RunAlone(&context, p, DType::kF32, one, {200}, Caches(p));
    want_two = RunAlone(&context, p, DType::kF32, two, {200}, Caches(p));
  }
  const CpuIsa before = GetCpuIsa();
  for (CpuIsa isa : {CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (!HasCpuIsa(isa)) continue;
    SetCpuIsa(isa);
    ArmContext context(2);
    const Caches caches(p);
    std::vector<float> got_one, got_two;
    int32_t start_one = 0, start_two = 0;
    for (const auto& rows :
         std::vector<std::pair<int32_t, int32_t>>{{7, 1}, {1, 100}, {120, 1}, {1, 27}, {71, 71}}) {
      const auto out =
          Step(&context, p, DType::kF32,
               {{&two, {2, start_two, rows.second, {}}}, {&one, {0, start_one, rows.first, {}}}},
               caches);
      got_two.insert(got_two.end(), out[0].begin(), out[0].end());
      got_one.insert(got_one.end(), out[1].begin(), out[1].end());
      start_one += rows.first;
      start_two += rows.second;
    }
    EXPECT_EQ(got_one, want_one);
    EXPECT_EQ(got_two, want_two);
  }
  SetCpuIsa(before);
}

TEST(Mamba2, RestoredSnapshotsContinueBitForBit) {
  const Mamba2Params p = MakeParams(4, 2, 16, 32);
  for (DType act : {DType::kF32, DType::kBF16}) {
    ArmContext context;
    const Inputs inputs(p, act, 200, 16);
    const Caches caches(p);
    std::vector<float> want;
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
    for (int32_t point : {64, 128, 192}) {
      Caches fresh(p);
      std::vector<float> values = fresh.state.Get();
      const std::vector<float> saved = RowsOf(caches.state_snapshot, point / 64, 1);
      std::copy(saved.begin(), saved.end(), values.begin() + 2 * fresh.state.view().RowElements());
      fresh.state.Set(values);
      const auto out = Step(&context, p, act, {{&inputs, {2, point, 200 - point, {}}}}, fresh);
      EXPECT_EQ(out[0], std::vector<float>(want.begin() + point * p.inner(), want.end())) << point;
    }
  }
}

// Columns [begin, begin + size) of each range, concatenated, of every row.
void CopyColumns(const ArmTensor& from, const std::vector<std::pair<int64_t, int64_t>>& ranges,
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
}

TEST(Mamba2, HeadsDoNotDependOnTheOtherGroupsOfTheRank) {
  const Mamba2Params p = MakeParams(8, 4, 16, 32), half = MakeParams(4, 2, 16, 32);
  const int32_t tokens = 80;
  ArmContext context;
  const Inputs inputs(p, DType::kF32, tokens, 17);
  const auto want = RunAlone(&context, p, DType::kF32, inputs, {tokens}, Caches(p));
  for (int64_t rank : {0, 1}) {
    Inputs part(half, DType::kF32, tokens, 18);
    CopyColumns(inputs.xbc, {{rank * 64, 64}, {128 + rank * 64, 64}, {256 + rank * 64, 64}},
                &part.xbc);
    CopyColumns(inputs.z, {{rank * 64, 64}}, &part.z);
    CopyColumns(inputs.dt, {{rank * 4, 4}}, &part.dt);
    part.a_log.Set(RowsOf(inputs.a_log, rank * 4, 4));
    part.d.Set(RowsOf(inputs.d, rank * 4, 4));
    part.dt_bias.Set(RowsOf(inputs.dt_bias, rank * 4, 4));
    part.norm.Set(RowsOf(inputs.norm, rank * 64, 64));
    const auto got = RunAlone(&context, half, DType::kF32, part, {tokens}, Caches(half));
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < 64; ++i) ASSERT_EQ(got[t * 64 + i], want[t * 128 + rank * 64 + i]);
    }
  }
}

// The gate comes before the norm: closing the gate on one half of a group's channels doubles the
// weight of the others in the mean, so that their results grow.
TEST(Mamba2, TheGateComesBeforeTheNorm) {
  const Mamba2Params p = MakeParams(2, 1, 16, 16);
  ArmContext context;
  Inputs inputs(p, DType::kF32, 1, 21);
  inputs.z.Set(std::vector<float>(32, 3.0f));
  const auto open = RunAlone(&context, p, DType::kF32, inputs, {1}, Caches(p));
  std::vector<float> z(32, 3.0f);
  std::fill(z.begin() + 16, z.end(), -40.0f);
  inputs.z.Set(z);
  const auto closed = RunAlone(&context, p, DType::kF32, inputs, {1}, Caches(p));
  for (int64_t i = 0; i < 16; ++i) EXPECT_GT(std::fabs(closed[i]), std::fabs(open[i]));
  EXPECT_LT(WorstError(closed, Reference(p, inputs, 1)), 2e-5);
}

// dt has no lower limit: softplus(-20) is 2e-9, not time_step_min.
TEST(Mamba2, SmallStepsAreNotClamped) {
  const Mamba2Params p = MakeParams(2, 1, 16, 16);
  ArmContext context;
  Inputs inputs(p, DType::kF32, 70, 22);
  inputs.dt.Set(std::vector<float>(140, 0.0f));
  inputs.dt_bias.Set(std::vector<float>{-20.0f, -20.0f});
  inputs.d.Set(std::vector<float>{0.0f, 0.0f});
  inputs.a_log.Set(std::vector<float>{0.0f, 0.0f});
  Mamba2Params unscaled = p;
  unscaled.norm_eps = 1e-30f;
  const auto got = RunAlone(&context, unscaled, DType::kF32, inputs, {70}, Caches(p));
  EXPECT_LT(WorstError(got, Reference(unscaled, inputs, 70)), 1e-4);
  // With the eps of the releases such rows vanish.
  const auto vanished = RunAlone(&context, p, DType::kF32, inputs, {70}, Caches(p));
  for (float v : vanished) EXPECT_LT(std::fabs(v), 1e-3);
}

TEST(Mamba2, StrongDecayStaysFiniteAndRight) {
  const Mamba2Params p = MakeParams(2, 1, 16, 16);
  ArmContext context;
  Inputs inputs(p, DType::kF32, 130, 19);
  inputs.a_log.Set(std::vector<float>{std::log(50.0f), std::log(50.0f)});
  const auto got = RunAlone(&context, p, DType::kF32, inputs, {130}, Caches(p));
  EXPECT_LT(WorstError(got, Reference(p, inputs, 130)), 1e-4);
}

TEST(Mamba2, RefusesWrongTensorsByName) {
  const Mamba2Params p = MakeParams(2, 1, 16, 16);
  ArmContext context;
  const Inputs inputs(p, DType::kF32, 2, 20);
  const Caches caches(p);
  BatchBuilder builder({{0, 0, 2, {}}});
  ArmTensor out(DType::kF32, {2, 32});
  const auto run = [&](const Mamba2Params& params, TensorView z) {
    return Mamba2(context.get(), builder.batch(), params, inputs.xbc.view(), z, inputs.dt.view(),
                  inputs.weights(), caches.view(), out.view());
  };
  EXPECT_THAT(run(p, inputs.xbc.view()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("mamba2: z is F32[2, 64], shape [2, 32] is needed")));
  EXPECT_THAT(run(MakeParams(3, 2, 16, 16), inputs.z.view()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("3 heads over 2 groups")));
  EXPECT_THAT(run(MakeParams(2, 1, 24, 16), inputs.z.view()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("24 (heads)")));
  EXPECT_THAT(run(MakeParams(128, 1, 256, 16), inputs.z.view()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("32768 channels, at most 16384 are possible")));
}

TEST(Mamba2, DryRunTouchesNothing) {
  const Mamba2Params p = MakeParams(2, 1, 16, 16);
  DryRunContext context;
  const Caches caches(p);
  BatchBuilder builder({{0, 0, 2, {}}});
  const TensorView xbc(nullptr, DType::kF32, {2, 64}), z(nullptr, DType::kF32, {2, 32});
  const TensorView dt(nullptr, DType::kF32, {2, 2}), h(nullptr, DType::kF32, {2});
  const TensorView norm(nullptr, DType::kF32, {32});
  EXPECT_OK(
      Mamba2(context.get(), builder.batch(), p, xbc, z, dt, {h, h, h, norm}, caches.view(), z));
}

}  // namespace
}  // namespace lockstep
