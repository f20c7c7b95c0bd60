// DeviceSampler against the CPU arm: equal requests and equal logits give equal results.
#include "kernels/sampling/device_sampler.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "gtest/gtest.h"
#include "kernels/base/check.h"
#include "kernels/base/hash.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/runtime/device_memory.h"
#include "kernels/runtime/testing/arm_test.h"

namespace lockstep {
namespace {

using testing::ArmContext;
using testing::ArmTensor;
using testing::CpuArmScope;
using ::testing::HasSubstr;
using testing::RandomFloats;
using testing::StatusIs;

constexpr float kInf = std::numeric_limits<float>::infinity();

bool HasDevice() { return testing::TestDevice() != DeviceType::kCpu; }

// Draws from a counter.
class Random {
 public:
  explicit Random(uint64_t seed) : seed_(Mix64(seed)) {}
  uint64_t Next() { return Mix64(seed_ + ++count_); }
  int64_t Below(int64_t n) { return static_cast<int64_t>(Next() % static_cast<uint64_t>(n)); }
  bool Coin(int64_t one_in = 2) { return Below(one_in) == 0; }
  template <typename T>
  T Of(std::initializer_list<T> values) {
    return values.begin()[Below(static_cast<int64_t>(values.size()))];
  }

 private:
  const uint64_t seed_;
  uint64_t count_ = 0;
};

std::vector<int32_t> RandomIds(Random* random, int64_t count, int64_t first, int64_t end) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    ids.push_back(static_cast<int32_t>(first + random->Below(end - first)));
  }
  return ids;
}

SamplingParams RandomParams(Random* random, int64_t vocab) {
  SamplingParams p;
  p.temperature = random->Of({0.0f, 0.1f, 0.7f, 1.0f, 1.0f, 2.0f, 1e-30f});
  p.top_k = random->Of({0, 0, 1, 3, 40, 1000, 5000, 1 << 30});
  p.top_p = random->Of({1.0f, 1.0f, 0.9f, 0.5f, 0.999f, 0.99999f, 1e-6f});
  p.min_p = random->Of({0.0f, 0.0f, 0.0f, 0.05f, 0.5f, 1e-6f});
  p.seed = random->Next();
  p.output_index = static_cast<uint32_t>(random->Below(3));
  p.num_logprobs = random->Of({-1, -1, 0, 1, 5, 20});
  if (random->Coin(3)) {
    p.presence_penalty = random->Of({0.0f, 0.5f, -1.0f});
    p.frequency_penalty = random->Of({0.0f, 0.3f, -0.1f});
    p.repetition_penalty = random->Of({1.0f, 1.3f, 0.8f});
  }
  // Ids of the lists may lie outside of the vocabulary and occur more than once.
  if (random->Coin(4)) {
    for (int32_t id : RandomIds(random, 50, -2, vocab + 2)) {
      p.logit_bias.emplace_back(id, static_cast<float>(random->Below(2001) - 1000) * 0.01f);
    }
    p.logit_bias.push_back(p.logit_bias.front());
  }
  if (random->Coin(4)) p.banned_ids = RandomIds(random, 1 + vocab / 8, -2, vocab + 2);
  if (random->Coin(6)) p.allowed_ids = RandomIds(random, 1 + vocab / 3, -2, vocab + 2);
  if (random->Coin(4)) {
    p.min_tokens = static_cast<int32_t>(random->Below(6));
    p.stop_ids = RandomIds(random, 1 + vocab / 16, 0, vocab);
  }
  return p;
}

// A row of one of many kinds: bell-shaped of several widths, with ties, constant, with -infinity,
// broken, spread over all binades.
std::vector<float> RandomRow(Random* random, int64_t vocab) {
  const float scale = random->Of({0.01f, 0.5f, 3.0f, 3.0f, 10.0f});
  std::vector<float> row(static_cast<size_t>(vocab));
  for (float& x : row) {
    float sum = 0.0f;
    const uint64_t bits = random->Next();
    for (int i = 0; i < 4; ++i) sum += static_cast<float>((bits >> (16 * i)) & 0xffff) - 32767.5f;
    x = sum * (scale / 37837.0f);
  }
  const int64_t kind = random->Below(16);
  if (kind == 0) std::fill(row.begin(), row.end(), scale);
  if (kind == 1 || kind == 2) {
    for (float& x : row) x = std::floor(x * 2.0f) * (kind == 1 ? 0.5f : 0.0f);
  }
  if (kind == 3 || kind == 4) {
    for (float& x : row) {
      if (random->Coin()) x = -kInf;
    }
  }
  const size_t some = static_cast<size_t>(random->Below(vocab));
  if (kind == 5) row[some] = std::nanf("");
  if (kind == 6) row[some] = -std::nanf("7");
  if (kind == 7) row[some] = kInf;
  if (kind == 8) std::fill(row.begin(), row.end(), -kInf);
  if (kind == 9) {
    for (float& x : row) x = std::ldexp(x, static_cast<int>(random->Below(60)) - 30);
  }
  if (kind == 10) row[some] = 1e6f;
  return row;
}

std::vector<float> Sharded(const std::vector<std::vector<float>>& rows, int64_t world,
                           int64_t local) {
  std::vector<float> out(static_cast<size_t>(world * local) * rows.size(), 1e9f);  // padding
  for (size_t r = 0; r < rows.size(); ++r) {
    for (size_t c = 0; c < rows[r].size(); ++c) {
      const size_t l = static_cast<size_t>(local);
      out[(c / l * rows.size() + r) * l + c % l] = rows[r][c];
    }
  }
  return out;
}

// Slots of a sampler, and the same state on the host.
class Pair {
 public:
  Pair(int64_t slots, int64_t vocab, int64_t staging_bytes = 1 << 20)
      : vocab_(vocab), states_(static_cast<size_t>(slots)), context_(2, int64_t{64} << 20) {
    auto sampler = DeviceSampler::Create({slots, vocab, slots + 8, staging_bytes});
    CHECK_OK(sampler.status());
    sampler_ = std::move(sampler).value();
  }

  DeviceSampler* sampler() { return sampler_.get(); }
  ExecContext* context() { return context_.get(); }
  int64_t op_launches() const { return context_.op_launches(); }

  void Reset(int32_t slot, const SamplingParams& params, const std::vector<int32_t>& prompt,
             const std::vector<int32_t>& output) {
    states_[static_cast<size_t>(slot)].Reset(params, vocab_, prompt, output);
    ASSERT_OK(sampler_->Reset(context_.get(), slot, params, prompt, output));
  }

  std::vector<SampleResult> OnDevice(const std::vector<std::vector<float>>& rows,
                                     const std::vector<SampleRow>& plan, int64_t world,
                                     bool with_top = true) {
    const int64_t local = (vocab_ + world - 1) / world + (world > 1 ? 3 : 0);
    ArmTensor logits(DType::kF32, {world, static_cast<int64_t>(rows.size()), local},
                     Sharded(rows, world, local));
    ArmTensor plan_tensor(DType::kI64, {static_cast<int64_t>(plan.size()), 2});
    std::vector<uint8_t> bytes(plan.size() * sizeof(SampleRow));
    std::memcpy(bytes.data(), plan.data(), bytes.size());
    plan_tensor.SetBytes(bytes);
    half_ = 1 - half_;
    CHECK_OK(sampler_->Launch(context_.get(), logits.view(), plan_tensor.view()));
    CHECK_OK(
        sampler_->CopyResults(context_.get(), static_cast<int64_t>(plan.size()), with_top, half_));
    plan_tensor.GetBytes();  // waits for the device
    std::vector<SampleResult> results;
    for (size_t i = 0; i < plan.size(); ++i) {
      results.push_back(sampler_->Result(half_, static_cast<int64_t>(i)));
    }
    return results;
  }

  // Row r is for slot r at position `position` + r, on both arms; the states advance.
  int64_t ExpectEqual(const std::vector<std::vector<float>>& rows, int64_t position, int64_t world,
                      const std::string& what) {
    std::vector<SampleRow> plan;
    std::vector<const SamplingState*> states;
    std::vector<int64_t> positions;
    std::vector<float> flat;
    for (size_t r = 0; r < rows.size(); ++r) {
      positions.push_back(position + static_cast<int64_t>(r));
      plan.push_back(
          sampler_->Row(static_cast<int32_t>(r), static_cast<int32_t>(r), positions.back()));
      states.push_back(&states_[r]);
      flat.insert(flat.end(), rows[r].begin(), rows[r].end());
    }
    const std::vector<SampleResult> got = OnDevice(rows, plan, world);
    CpuArmScope cpu;
    ArmContext context(2, int64_t{64} << 20);
    ArmTensor logits(DType::kF32, {static_cast<int64_t>(rows.size()), vocab_}, flat);
    std::vector<SampleResult> want;
    CHECK_OK(Sample(context.get(), logits.view(), vocab_, states, positions, &want));
    int64_t differ = 0;
    for (size_t r = 0; r < rows.size(); ++r) {
      const bool same = got[r].id == want[r].id && got[r].nan == want[r].nan &&
                        got[r].all_masked == want[r].all_masked &&
                        got[r].digest == want[r].digest && got[r].logprob == want[r].logprob &&
                        got[r].top_logprobs == want[r].top_logprobs;
      differ += !same;
      const SamplingParams& p = states_[r].params();
      EXPECT_TRUE(same) << what << " row " << r << ": id " << got[r].id << " and " << want[r].id
                        << ", logprob " << got[r].logprob << " and " << want[r].logprob
                        << ", flags " << got[r].nan << got[r].all_masked << " and " << want[r].nan
                        << want[r].all_masked << ", digests equal "
                        << (got[r].digest == want[r].digest) << ", " << got[r].top_logprobs.size()
                        << " and " << want[r].top_logprobs.size() << " top; temperature "
                        << p.temperature << " top_k " << p.top_k << " top_p " << p.top_p
                        << " min_p " << p.min_p;
      if (want[r].id >= 0) states_[r].Append(want[r].id);
    }
    return differ;
  }

 private:
  const int64_t vocab_;
  std::vector<SamplingState> states_;
  ArmContext context_;
  std::unique_ptr<DeviceSampler> sampler_;
  int half_ = 0;
};

// Random requests, several steps each.
void ExpectEqualOverRandomRequests(int64_t vocab, int64_t slots, int64_t rounds, int64_t steps,
                                   uint64_t seed) {
  Random random(seed);
  Pair pair(slots, vocab);
  for (int64_t round = 0; round < rounds; ++round) {
    pair.sampler()->BeginStep();
    for (int32_t slot = 0; slot < slots; ++slot) {
      pair.Reset(slot, RandomParams(&random, vocab), RandomIds(&random, 40, 0, vocab),
                 RandomIds(&random, random.Below(8), 0, vocab));
    }
    for (int64_t step = 0; step < steps; ++step) {
      std::vector<std::vector<float>> rows;
      for (int64_t r = 0; r < slots; ++r) rows.push_back(RandomRow(&random, vocab));
      const int64_t world = random.Of({1, 2, 4});
      const int64_t differ = pair.ExpectEqual(
          rows, 1000 * step, world,
          absl::StrCat("vocabulary ", vocab, " round ", round, " step ", step, " world ", world));
      if (differ > 0) return;  // later steps differ for want of equal states
    }
  }
}

TEST(DeviceSampler, ResultsAreThoseOfTheReferenceArm) {
  if (!HasDevice()) return;
  ExpectEqualOverRandomRequests(1, 8, 2, 2, 1);
  ExpectEqualOverRandomRequests(100, 32, 8, 4, 2);
  ExpectEqualOverRandomRequests(2048, 32, 8, 4, 3);
  ExpectEqualOverRandomRequests(2049, 16, 4, 3, 4);
}

TEST(DeviceSampler, ResultsAreThoseOfTheReferenceArmForLargeVocabularies) {
  if (!HasDevice()) return;
  ExpectEqualOverRandomRequests(10007, 32, 16, 2, 5);
  ExpectEqualOverRandomRequests(32000, 32, 4, 2, 6);
  ExpectEqualOverRandomRequests(151936, 16, 2, 1, 7);
  ExpectEqualOverRandomRequests(262144, 8, 1, 1, 8);
}

// Rows whose ids do not fit into the list of those whose order decides.
TEST(DeviceSampler, FlatRowsAreCutExactly) {
  if (!HasDevice()) return;
  const int64_t vocab = 9000;
  std::vector<SamplingParams> all;
  for (int32_t top_k : {0, 1, 4097, 8999, 9000}) {
    for (float top_p : {1.0f, 0.3f, 0.99f}) {
      SamplingParams p;
      p.top_k = top_k;
      p.top_p = top_p;
      p.seed = 5;
      all.push_back(p);
    }
  }
  Pair pair(static_cast<int64_t>(all.size()), vocab);
  Random random(9);
  for (float spread : {0.0f, 1e-4f, 3e-3f}) {
    pair.sampler()->BeginStep();
    std::vector<std::vector<float>> rows;
    for (size_t i = 0; i < all.size(); ++i) {
      pair.Reset(static_cast<int32_t>(i), all[i], {}, {});
      rows.push_back(RandomFloats(vocab, random.Next(), spread));
    }
    pair.ExpectEqual(rows, 7, 1, absl::StrCat("spread ", spread));
  }
}

TEST(DeviceSampler, RowsOfDigestsAndPaddingChangeNoState) {
  if (!HasDevice()) return;
  const int64_t vocab = 3000;
  Pair pair(2, vocab);
  SamplingParams greedy;
  greedy.temperature = 0.0f;
  pair.sampler()->BeginStep();
  pair.Reset(0, greedy, {}, {});
  pair.Reset(1, greedy, {}, {});
  Random random(3);
  std::vector<std::vector<float>> rows = {RandomFloats(vocab, 1), RandomFloats(vocab, 2),
                                          RandomFloats(vocab, 3), RandomFloats(vocab, 4)};
  rows[1][17] = 9.0f;
  rows[2][2999] = std::nanf("");
  rows[3][5] = kInf;
  const DeviceSampler& sampler = *pair.sampler();
  const std::vector<SampleResult> got =
      pair.OnDevice(rows,
                    {sampler.Row(3, -1, 0), sampler.Row(1, 1, 5), DeviceSampler::PaddingRow(),
                     sampler.Row(2, -1, 0), sampler.Row(0, -1, 0)},
                    2, false);
  EXPECT_EQ(got[1].id, 17);
  for (size_t i : {0, 2, 3, 4}) EXPECT_EQ(got[i].id, -1);
  EXPECT_EQ(got[0].digest, LogitsDigest(rows[3].data(), vocab));
  EXPECT_EQ(got[1].digest, LogitsDigest(rows[1].data(), vocab));
  EXPECT_EQ(got[2].digest, 0u);
  EXPECT_EQ(got[3].digest, LogitsDigest(rows[2].data(), vocab));
  EXPECT_EQ(got[4].digest, LogitsDigest(rows[0].data(), vocab));
  EXPECT_FALSE(got[0].nan);
  EXPECT_TRUE(got[3].nan);
  EXPECT_FALSE(got[4].nan);
  std::vector<int32_t> last(2);
  CHECK_OK(
      CopyBytes(DeviceType::kCpu, last.data(), DeviceType::kCuda, sampler.last_sampled().data, 8));
  EXPECT_EQ(last, std::vector<int32_t>({0, 17}));
  EXPECT_EQ(pair.op_launches(), 1);
}

TEST(DeviceSampler, FeedbackPutsSampledIdsIntoTokens) {
  if (!HasDevice()) return;
  const int64_t vocab = 50;
  Pair pair(3, vocab);
  SamplingParams greedy;
  greedy.temperature = 0.0f;
  pair.sampler()->BeginStep();
  std::vector<std::vector<float>> rows;
  std::vector<SampleRow> plan;
  for (int32_t slot = 0; slot < 3; ++slot) {
    pair.Reset(slot, greedy, {}, {});
    rows.push_back(std::vector<float>(50, 0.0f));
    rows.back()[static_cast<size_t>(10 + slot)] = 1.0f;
    plan.push_back(pair.sampler()->Row(slot, slot, 0));
  }
  rows[1][3] = std::nanf("");  // feeds token 0
  pair.OnDevice(rows, plan, 1);
  ArmTensor tokens({5}, {-1, 40, 41, -1, -1}), offsets({5}, {0, 1, 3, 4, 5}),
      slots({4}, {2, 0, 1, 0});
  ASSERT_OK(
      pair.sampler()->ResolveFeedback(pair.context(), tokens.view(), offsets.view(), slots.view()));
  const std::vector<uint8_t> bytes = tokens.GetBytes();
  std::vector<int32_t> got(5);
  std::memcpy(got.data(), bytes.data(), 20);
  EXPECT_EQ(got, std::vector<int32_t>({12, 40, 41, 0, 10}));
}

TEST(DeviceSampler, StagingMemoryGrowsOnceForLongLogs) {
  if (!HasDevice()) return;
  const int64_t vocab = 700;
  Pair pair(4, vocab, 256);
  Random random(4);
  for (int step = 0; step < 4; ++step) {
    pair.sampler()->BeginStep();
    std::vector<std::vector<float>> rows;
    for (int32_t slot = 0; slot < 4; ++slot) {
      SamplingParams p;
      p.presence_penalty = 1.0f;
      p.seed = random.Next();
      pair.Reset(slot, p, RandomIds(&random, 100, 0, vocab), RandomIds(&random, 20, 0, vocab));
      rows.push_back(RandomFloats(vocab, random.Next(), 2.0f));
    }
    EXPECT_EQ(pair.ExpectEqual(rows, step, 1, "staging"), 0);
    EXPECT_EQ(pair.sampler()->staging_blocks(), step == 0 ? 6 : 10);
  }
}

TEST(DeviceSampler, RefusesWhatItCannotHold) {
  const auto code = absl::StatusCode::kInvalidArgument;
  EXPECT_THAT(DeviceSampler::Create({4, (1 << 18) + 1, 4, 64}).status(),
              StatusIs(code, HasSubstr("a vocabulary of 262145")));
  EXPECT_THAT(DeviceSampler::Create({0, 10, 4, 64}).status(), StatusIs(code, HasSubstr("0 slots")));
  if (!HasDevice()) return;
  Pair pair(1, 10);
  SamplingParams p;
  p.num_logprobs = 21;
  EXPECT_THAT(pair.sampler()->Reset(pair.context(), 0, p, {}, {}),
              StatusIs(code, HasSubstr("21 logprobs")));
  ArmTensor logits(DType::kF32, {1, 2, 9}), rows(DType::kI64, {2, 2}), wrong(DType::kI32, {2, 2});
  EXPECT_THAT(pair.sampler()->Launch(pair.context(), logits.view(), rows.view()),
              StatusIs(code, HasSubstr("F32[1, 2, 9] for a vocabulary of 10")));
  EXPECT_THAT(pair.sampler()->Launch(pair.context(), logits.view(), wrong.view()),
              StatusIs(code, HasSubstr("rows is I32[2, 2]")));
}

TEST(DeviceSampler, DryRunSizesTheWorkspace) {
  if (!HasDevice()) return;
  Pair pair(1, 1000);
  testing::DryRunContext context;
  ASSERT_OK(pair.sampler()->Launch(
      context.get(), TensorView(nullptr, DType::kF32, {1, 4, 1000}, DeviceType::kCuda),
      TensorView(nullptr, DType::kI64, {4, 2}, DeviceType::kCuda)));
  EXPECT_GT(context.workspace().peak(), 0);
}

}  // namespace
}  // namespace lockstep
