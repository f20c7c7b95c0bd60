#include "worker/host_sampler.h"

#include <cmath>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::lockstep::testing::IsOk;

constexpr int64_t kVocab = 4;

class HostSamplerTest : public ::testing::Test {
 protected:
  HostSamplerTest() {
    CHECK_OK(workspace_.Allocate(DeviceType::kCpu, 1 << 12));
    ctx_.pool = &pool_;
    ctx_.workspace = &workspace_;
    ctx_.counters = &counters_;
    BatchLimits limits;
    limits.slots = 3;
    limits.vocab_size = kVocab;
    sampler_ = MakeHostSampler(limits);
  }

  void Begin(int32_t slot, float presence_penalty = 0.0f) {
    SamplingParams params;
    params.temperature = 0.0f;
    params.presence_penalty = presence_penalty;
    ASSERT_OK(sampler_->BeginStep());
    ASSERT_OK(sampler_->Begin(&ctx_, slot, params, {0}, {}));
  }

  // One rank's rows of kVocab logits.
  std::vector<SampleResult> Step(const std::vector<LogitRow>& rows,
                                 const std::vector<float>& logits) {
    const int64_t count = static_cast<int64_t>(rows.size());
    CHECK_OK(sampler_->Stage(&ctx_, rows, 1));
    CHECK_OK(sampler_->Launch(
        &ctx_, ConstTensorView(logits.data(), DType::kF32, Shape{1, count, kVocab})));
    CHECK_OK(sampler_->Finish(&ctx_, 1));
    std::vector<SampleResult> results;
    CHECK_OK(sampler_->Collect(1, &results));
    return results;
  }

  // What `token`, alone in a batch of the slot, becomes.
  int32_t Fed(int32_t slot, int32_t token) {
    const std::vector<int32_t> offsets = {0, 1};
    ForwardBatch batch;
    batch.num_tokens = batch.num_sequences = 1;
    batch.tokens = ConstTensorView(&token, DType::kI32, Shape{1});
    batch.row_offsets = ConstTensorView(offsets.data(), DType::kI32, Shape{2});
    batch.slots = ConstTensorView(&slot, DType::kI32, Shape{1});
    CHECK_OK(sampler_->Feed(&ctx_, batch));
    return token;
  }

  ThreadPool pool_{2};
  Workspace workspace_;
  Counters counters_;
  ExecContext ctx_;
  std::unique_ptr<StepSampler> sampler_;
};

TEST_F(HostSamplerTest, ResultsAreInTheOrderOfTheRows) {
  Begin(0);
  Begin(2);
  const std::vector<float> logits = {0, 1, 2, 3, 9, 1, 2, 3, 0, 1, 8, 3};
  const std::vector<SampleResult> results = Step({{-1, 0}, {2, 5}, {0, 7}}, logits);
  ASSERT_EQ(results.size(), 3u);
  EXPECT_EQ(results[0].digest, LogitsDigest(&logits[0], kVocab));
  EXPECT_EQ(results[1].digest, LogitsDigest(&logits[4], kVocab));
  EXPECT_EQ(results[2].digest, LogitsDigest(&logits[8], kVocab));
  EXPECT_EQ(results[0].id, -1);
  EXPECT_EQ(results[1].id, 0);
  EXPECT_EQ(results[2].id, 2);
}

TEST_F(HostSamplerTest, SampledTokensFeedTheSlotAndCount) {
  Begin(1, /*presence_penalty=*/5.0f);
  const std::vector<float> logits = {0, 1, 2, 4};
  EXPECT_EQ(Step({{1, 1}}, logits)[0].id, 3);
  EXPECT_EQ(Fed(1, -1), 3);
  EXPECT_EQ(Fed(1, 2), 2) << "a token that the plan names stays";
  EXPECT_EQ(Step({{1, 2}}, logits)[0].id, 2) << "3 was generated and is penalized";
}

TEST_F(HostSamplerTest, ARowWithNanFeedsTokenZeroAndIsNotCounted) {
  Begin(1, /*presence_penalty=*/5.0f);
  const std::vector<float> logits = {0, 1, 2, 4};
  ASSERT_EQ(Step({{1, 1}}, logits)[0].id, 3);
  const std::vector<SampleResult> broken = Step({{1, 2}, {-1, 0}}, {9, NAN, 2, 4, 0, 1, NAN, 3});
  EXPECT_TRUE(broken[0].nan);
  EXPECT_EQ(broken[0].id, -1);
  EXPECT_TRUE(broken[1].nan) << "rows without a sample say it too";
  EXPECT_EQ(Fed(1, -1), 0);
  // Neither 0 nor anything else was counted meanwhile.
  EXPECT_EQ(Step({{1, 3}}, {9, 1, 2, 4})[0].id, 0);
}

TEST_F(HostSamplerTest, ANewOwnerStartsWithoutTheOldCounts) {
  Begin(1, /*presence_penalty=*/5.0f);
  const std::vector<float> logits = {0, 1, 2, 4};
  ASSERT_EQ(Step({{1, 1}}, logits)[0].id, 3);
  Begin(1, /*presence_penalty=*/5.0f);
  EXPECT_EQ(Step({{1, 1}}, logits)[0].id, 3);
}

}  // namespace
}  // namespace lockstep
