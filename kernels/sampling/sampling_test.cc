#include "kernels/sampling/sampling.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "kernels/base/hash.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/testing/arm_test.h"

namespace lockstep {
namespace {

using testing::ArmContext;
using testing::ArmTensor;
using testing::DryRunContext;
using ::testing::HasSubstr;
using testing::RandomFloats;
using testing::StatusIs;

constexpr float kInf = std::numeric_limits<float>::infinity();

SamplingState MakeState(const SamplingParams& params, int64_t vocab,
                        const std::vector<int32_t>& prompt = {},
                        const std::vector<int32_t>& output = {}) {
  SamplingState state;
  state.Reset(params, vocab, prompt, output);
  return state;
}

SamplingParams Greedy() {
  SamplingParams p;
  p.temperature = 0.0f;
  return p;
}

SampleResult SampleOne(const std::vector<float>& row, const SamplingState& state,
                       int64_t position = 0) {
  ArmContext context;
  ArmTensor logits(DType::kF32, {1, static_cast<int64_t>(row.size())}, row);
  std::vector<SampleResult> results;
  CHECK_OK(
      Sample(context.get(), logits.view(), state.vocab_size(), {&state}, {position}, &results));
  EXPECT_EQ(context.op_launches(), 1);
  return results[0];
}

// How often each id is drawn over positions [0, draws), as fractions.
std::vector<double> Frequencies(const std::vector<float>& row, const SamplingParams& params,
                                int64_t draws) {
  const SamplingState state = MakeState(params, static_cast<int64_t>(row.size()));
  ArmContext context;
  ArmTensor logits(DType::kF32, {1, static_cast<int64_t>(row.size())}, row);
  std::vector<double> counts(row.size());
  std::vector<SampleResult> results;
  for (int64_t i = 0; i < draws; ++i) {
    CHECK_OK(Sample(context.get(), logits.view(), state.vocab_size(), {&state}, {i}, &results));
    counts[static_cast<size_t>(results[0].id)] += 1.0;
  }
  for (double& c : counts) c /= static_cast<double>(draws);
  return counts;
}

std::vector<double> Softmax(const std::vector<float>& row, double temperature,
                            const std::vector<bool>& kept = {}) {
  std::vector<double> p;
  double sum = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    p.push_back(kept.empty() || kept[i] ? std::exp(row[i] / temperature) : 0.0);
    sum += p.back();
  }
  for (double& e : p) e /= sum;
  return p;
}

void ExpectFrequencies(const std::vector<double>& got, const std::vector<double>& want,
                       int64_t draws) {
  for (size_t i = 0; i < got.size(); ++i) {
    // Five standard deviations; an id outside of the set is never drawn.
    const double sigma = std::sqrt(want[i] * (1 - want[i]) / static_cast<double>(draws));
    EXPECT_LE(std::fabs(got[i] - want[i]), 5 * sigma) << "id " << i << " of " << got.size();
  }
}

TEST(Digest, IsTheSumOverIdsAndShardsAddUp) {
  const std::vector<float> row = RandomFloats(1003, 1);
  uint64_t want = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    want += Mix64(static_cast<uint64_t>(i) << 32 | FloatToBits(row[i]));
  }
  const CpuIsa before = GetCpuIsa();
  for (CpuIsa isa : {CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (!HasCpuIsa(isa)) continue;
    SetCpuIsa(isa);
    EXPECT_EQ(LogitsDigest(row.data(), 1003), want);
  }
  SetCpuIsa(before);
  std::vector<float> other = row;
  other[7] = std::nextafter(other[7], 2.0f);
  EXPECT_NE(LogitsDigest(other.data(), 1003), want);
}

TEST(Sample, GreedyTakesTheLargestAndTheLowerIdOfEqualOnes) {
  std::vector<float> row = RandomFloats(700, 2);
  row[300] = row[650] = 2.0f;
  const SampleResult r = SampleOne(row, MakeState(Greedy(), 700));
  EXPECT_EQ(r.id, 300);
  EXPECT_EQ(r.digest, LogitsDigest(row.data(), 700));
  row[5] = -0.0f;
  EXPECT_EQ(SampleOne({-1.0f, -0.0f, 0.0f}, MakeState(Greedy(), 3)).id, 1);
}

TEST(Sample, PaddingColumnsAreNeverChosenNorDigested) {
  std::vector<float> row = RandomFloats(128, 3);
  row[100] = 50.0f;
  row[127] = std::nanf("");
  const SampleResult r = SampleOne(row, MakeState(Greedy(), 100));
  EXPECT_LT(r.id, 100);
  EXPECT_FALSE(r.nan);
  EXPECT_EQ(r.digest, LogitsDigest(row.data(), 100));
}

TEST(Sample, BrokenRowsAreFlaggedAndNegativeInfinityIsLegal) {
  for (float bad : {std::nanf(""), -std::nanf(""), kInf}) {
    std::vector<float> row = RandomFloats(300, 4);
    row[299] = bad;
    const SampleResult r = SampleOne(row, MakeState(SamplingParams(), 300));
    EXPECT_TRUE(r.nan);
    EXPECT_EQ(r.id, -1);
  }
  std::vector<float> row(300, -kInf);
  row[123] = -5.0f;
  for (float temperature : {0.0f, 1.0f}) {
    SamplingParams p;
    p.temperature = temperature;
    EXPECT_EQ(SampleOne(row, MakeState(p, 300)).id, 123);
    p.top_p = 0.5f;
    EXPECT_EQ(SampleOne(row, MakeState(p, 300)).id, 123);
  }
}

TEST(Sample, MasksAreAbsoluteAndAnEmptyVocabularyIsReported) {
  const std::vector<float> row = {5.0f, 4.0f, 3.0f, 2.0f, 1.0f};
  SamplingParams p = Greedy();
  p.banned_ids = {0, 99};
  EXPECT_EQ(SampleOne(row, MakeState(p, 5)).id, 1);
  p.allowed_ids = {0, 3, 4, -1};
  EXPECT_EQ(SampleOne(row, MakeState(p, 5)).id, 3);
  p.stop_ids = {3};
  p.min_tokens = 2;
  EXPECT_EQ(SampleOne(row, MakeState(p, 5, {}, {1})).id, 4);
  EXPECT_EQ(SampleOne(row, MakeState(p, 5, {}, {1, 1})).id, 3);
  p.logit_bias = {{3, 1e30f}};
  EXPECT_EQ(SampleOne(row, MakeState(p, 5)).id, 4);
  p.allowed_ids = {0, 3};
  for (float temperature : {0.0f, 1.0f}) {
    p.temperature = temperature;
    const SampleResult r = SampleOne(row, MakeState(p, 5));
    EXPECT_TRUE(r.all_masked);
    EXPECT_EQ(r.id, -1);
  }
}

TEST(Sample, PenaltiesAndBiasFollowTheirDefinitions) {
  const std::vector<float> row = {2.0f, 1.9f, -1.0f, 1.0f};
  SamplingParams p = Greedy();
  p.repetition_penalty = 1.5f;
  EXPECT_EQ(SampleOne(row, MakeState(p, 4, {0}, {})).id, 1);
  EXPECT_EQ(SampleOne(row, MakeState(p, 4, {0, 1}, {})).id, 0);
  EXPECT_EQ(SampleOne(row, MakeState(p, 4, {}, {0})).id, 1);
  EXPECT_EQ(SampleOne({-1.0f, -1.2f}, MakeState(p, 2, {0}, {})).id, 1);
  p = Greedy();
  p.presence_penalty = 0.5f;
  EXPECT_EQ(SampleOne(row, MakeState(p, 4, {0}, {})).id, 0);
  EXPECT_EQ(SampleOne(row, MakeState(p, 4, {}, {0, 0, 1})).id, 0);
  p = Greedy();
  p.frequency_penalty = 0.3f;
  EXPECT_EQ(SampleOne(row, MakeState(p, 4, {}, {0, 1, 1})).id, 0);
  EXPECT_EQ(SampleOne(row, MakeState(p, 4, {}, {0, 0, 1})).id, 1);
  p = Greedy();
  p.logit_bias = {{3, 1.5f}};
  EXPECT_EQ(SampleOne(row, MakeState(p, 4)).id, 3);
}

TEST(SamplingState, AppendEqualsResetWithTheLongerLog) {
  SamplingState state = MakeState(SamplingParams(), 10, {1, 2}, {3});
  state.Append(3);
  state.Append(4);
  const SamplingState whole = MakeState(SamplingParams(), 10, {1, 2}, {3, 3, 4});
  EXPECT_EQ(state.num_output(), 3);
  for (int32_t id = 0; id < 10; ++id) {
    EXPECT_EQ(state.output_count(id), whole.output_count(id));
    EXPECT_EQ(state.in_prompt(id), whole.in_prompt(id));
  }
}

TEST(Sample, FrequenciesFollowTheTemperature) {
  const std::vector<float> row = {1.0f, 0.0f, 2.5f, -3.0f, 0.7f};
  const int64_t draws = 40000;
  for (float temperature : {0.5f, 1.0f, 2.0f}) {
    SamplingParams p;
    p.temperature = temperature;
    p.seed = 7;
    ExpectFrequencies(Frequencies(row, p, draws), Softmax(row, temperature), draws);
  }
}

TEST(Sample, RestrictionsCutExactlyTheSet) {
  // Probabilities at temperature 1: about .39 .24 .24 .09 .05, the two equal ones at ids 0 and 3.
  const std::vector<float> row = {1.0f, -0.5f, 1.5f, 1.0f, 0.0f};
  const int64_t draws = 20000;
  const auto expect = [&](const SamplingParams& p, const std::vector<bool>& kept) {
    ExpectFrequencies(Frequencies(row, p, draws), Softmax(row, 1.0, kept), draws);
  };
  SamplingParams p;
  p.top_k = 2;
  expect(p, {true, false, true, false, false});
  p.top_k = 3;
  expect(p, {true, false, true, true, false});
  // Of the three best, .45 .275 .275: 0.7 needs two of them.
  p.top_p = 0.7f;
  expect(p, {true, false, true, false, false});
  p = SamplingParams();
  p.top_p = 0.6f;
  expect(p, {true, false, true, false, false});
  p.top_p = 0.64f;
  expect(p, {true, false, true, true, false});
  p.top_p = 1e-6f;
  expect(p, {false, false, true, false, false});
  p = SamplingParams();
  p.min_p = 0.2f;
  expect(p, {true, false, true, true, true});
  p.min_p = 0.5f;
  expect(p, {true, false, true, true, false});
  p.top_k = 2;
  expect(p, {true, false, true, false, false});
}

TEST(Sample, WideSetsKeepTheKeyedNoiseOfPlainSampling) {
  // A restriction that restricts nothing draws the same ids as none.
  const std::vector<float> row = RandomFloats(5000, 5, 2.0f);
  SamplingParams plain;
  plain.seed = 9;
  SamplingParams wide = plain;
  wide.top_k = 4999;
  wide.top_p = 0.9999f;
  int differ = 0;
  for (int64_t position = 0; position < 50; ++position) {
    differ += SampleOne(row, MakeState(plain, 5000), position).id !=
              SampleOne(row, MakeState(wide, 5000), position).id;
  }
  EXPECT_LE(differ, 1);
}

TEST(Sample, KeyHasSeedOutputIndexAndPosition) {
  const std::vector<float> row(512, 0.0f);
  SamplingParams p;
  const auto draws = [&](int64_t first) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < 8; ++i) ids.push_back(SampleOne(row, MakeState(p, 512), first + i).id);
    return ids;
  };
  const auto base = draws(0);
  EXPECT_EQ(draws(0), base);
  EXPECT_NE(draws(100), base);
  p.seed = 1;
  EXPECT_NE(draws(0), base);
  p.seed = 0;
  p.output_index = 1;
  EXPECT_NE(draws(0), base);
}

TEST(Sample, TinyTemperaturesAreGreedyAndFinite) {
  const std::vector<float> row = RandomFloats(400, 6, 20.0f);
  const int32_t want = SampleOne(row, MakeState(Greedy(), 400)).id;
  for (float temperature : {1e-6f, 1e-30f, 1e-45f}) {
    SamplingParams p;
    p.temperature = temperature;
    EXPECT_EQ(SampleOne(row, MakeState(p, 400)).id, want);
    p.top_p = 0.9f;
    EXPECT_EQ(SampleOne(row, MakeState(p, 400)).id, want);
  }
}

TEST(Sample, RowsDoNotDependOnTheBatchThreadsOrInstructionSet) {
  const int64_t rows = 21, vocab = 1000;
  const std::vector<float> values = RandomFloats(rows * vocab, 7, 5.0f);
  std::vector<SamplingState> states;
  for (int64_t r = 0; r < rows; ++r) {
    SamplingParams p;
    p.seed = static_cast<uint64_t>(r);
    p.temperature = r % 4 == 0 ? 0.0f : 0.8f;
    if (r % 4 == 2) p.top_k = 40, p.top_p = 0.9f;
    if (r % 4 == 3) p.top_p = 0.95f, p.presence_penalty = 0.3f;
    p.num_logprobs = r % 3 == 0 ? 5 : -1;
    states.push_back(MakeState(p, vocab, {1, 2, 3}, {5, 5}));
  }
  std::vector<SampleResult> want;
  for (int64_t r = 0; r < rows; ++r) {
    const std::vector<float> row(values.begin() + r * vocab, values.begin() + (r + 1) * vocab);
    want.push_back(SampleOne(row, states[static_cast<size_t>(r)], 10 * r));
  }
  const CpuIsa before = GetCpuIsa();
  for (CpuIsa isa : {CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (!HasCpuIsa(isa)) continue;
    SetCpuIsa(isa);
    for (int64_t step : {1, 8, 13}) {  // orders of the rows
      std::vector<float> shuffled;
      std::vector<const SamplingState*> pointers;
      std::vector<int64_t> positions, order;
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t r = i * step % rows;
        order.push_back(r);
        shuffled.insert(shuffled.end(), values.begin() + r * vocab,
                        values.begin() + (r + 1) * vocab);
        pointers.push_back(&states[static_cast<size_t>(r)]);
        positions.push_back(10 * r);
      }
      ArmContext context(3);
      ArmTensor logits(DType::kF32, {rows, vocab}, shuffled);
      std::vector<SampleResult> got;
      ASSERT_OK(Sample(context.get(), logits.view(), vocab, pointers, positions, &got));
      for (int64_t i = 0; i < rows; ++i) {
        const SampleResult& a = got[static_cast<size_t>(i)];
        const SampleResult& b = want[static_cast<size_t>(order[static_cast<size_t>(i)])];
        EXPECT_EQ(a.id, b.id);
        EXPECT_EQ(a.digest, b.digest);
        EXPECT_EQ(a.logprob, b.logprob);
        EXPECT_EQ(a.top_logprobs, b.top_logprobs);
      }
    }
  }
  SetCpuIsa(before);
}

TEST(Sample, LogprobsAreThoseOfTheRawLogits) {
  std::vector<float> row = RandomFloats(777, 8, 6.0f);
  row[70] = row[700] = 6.5f;
  SamplingParams p;
  p.num_logprobs = 4;
  p.banned_ids = {70};
  p.temperature = 0.3f;
  const SampleResult r = SampleOne(row, MakeState(p, 777));
  const std::vector<double> want = Softmax(row, 1.0);
  EXPECT_NEAR(r.logprob, std::log(want[static_cast<size_t>(r.id)]), 2e-6);
  ASSERT_EQ(r.top_logprobs.size(), 4u);
  EXPECT_EQ(r.top_logprobs[0].first, 70);
  EXPECT_EQ(r.top_logprobs[1].first, 700);
  for (const auto& e : r.top_logprobs) {
    EXPECT_NEAR(e.second, std::log(want[static_cast<size_t>(e.first)]), 2e-6);
  }
  p.num_logprobs = 0;
  EXPECT_TRUE(SampleOne(row, MakeState(p, 777)).top_logprobs.empty());
  EXPECT_NE(SampleOne(row, MakeState(p, 777)).logprob, 0.0f);
}

TEST(Sample, RefusesWrongArguments) {
  ArmContext context;
  ArmTensor logits(DType::kF32, {2, 8}), wrong(DType::kBF16, {2, 8});
  const SamplingState state = MakeState(Greedy(), 8), small = MakeState(Greedy(), 7);
  std::vector<SampleResult> results;
  const auto sample = [&](TensorView l, int64_t vocab, std::vector<const SamplingState*> states) {
    return Sample(context.get(), l, vocab, states, {1, 2}, &results);
  };
  EXPECT_OK(sample(logits.view(), 8, {&state, &state}));
  EXPECT_THAT(sample(wrong.view(), 8, {&state, &state}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("sample: logits is BF16")));
  EXPECT_THAT(sample(logits.view(), 9, {&state, &state}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("vocab_size is 9")));
  EXPECT_THAT(sample(logits.view(), 8, {&state}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("2 rows of logits with 1")));
  EXPECT_THAT(sample(logits.view(), 8, {&state, &small}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("a vocabulary of 7")));
}

TEST(Sample, DryRunSizesTheWorkspace) {
  DryRunContext context;
  std::vector<SampleResult> results;
  ASSERT_OK(
      Sample(context.get(), TensorView(nullptr, DType::kF32, {3, 128}), 100, {}, {}, &results));
  EXPECT_GT(context.workspace().peak(), 0);
}

}  // namespace
}  // namespace lockstep
