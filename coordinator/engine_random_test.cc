// Random traces through the engine: whatever is cancelled, preempted, cached or chunked, each
// request that ends gives the tokens and the digest of an undisturbed run, and nothing leaks.
#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/engine.h"
#include "coordinator/engine_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/hash.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace testing {
namespace {

struct Trace {
  const char* name;
  int64_t kv_blocks;
  int64_t slots;
  int64_t snapshots;
  int64_t max_batch_tokens;
  int64_t max_logit_rows;
  int32_t steps_in_flight;
  int64_t preempt_every;
  bool random_chunks;
  int cancel_percent;
};

class EngineRandomTest : public ::testing::TestWithParam<Trace> {};

GenerationSpec RandomSpec(int i, std::mt19937_64* random) {
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(*random);
  };
  // Prompts share long beginnings, so that they meet in the prefix cache.
  std::vector<int32_t> prompt = MakePrompt(draw(0, 220), static_cast<uint64_t>(draw(1, 3)));
  const std::vector<int32_t> tail = MakePrompt(draw(1, 60), static_cast<uint64_t>(i) + 100);
  prompt.insert(prompt.end(), tail.begin(), tail.end());
  GenerationSpec spec =
      MakeSpec(absl::StrCat("r", i), std::move(prompt), static_cast<int32_t>(draw(1, 100)));
  spec.n = draw(0, 9) == 0 ? 3 : 1;
  spec.priority = static_cast<int32_t>(draw(0, 2));
  spec.cache_bypass = draw(0, 9) == 0;
  spec.cache_salt = draw(0, 4) == 0 ? "salt" : "";
  if (draw(0, 2) == 0) {
    // A stop id that the model will give somewhere.
    const FakeStepTransport::Expected expected = EngineFixture::Expect(spec);
    const int64_t at = draw(0, spec.max_tokens - 1);
    spec.stop_token_ids = {expected.ids[static_cast<size_t>(at)]};
    spec.sampling.add_stop_ids(spec.stop_token_ids[0]);
    spec.include_stop_in_output = draw(0, 1) == 0;
  }
  return spec;
}

TEST_P(EngineRandomTest, OutputsEqualUndisturbedRuns) {
  const Trace& trace = GetParam();
  EngineOptions options = SmallEngine();
  options.kv_blocks = trace.kv_blocks;
  options.slots = trace.slots;
  options.snapshots = trace.snapshots;
  options.max_batch_tokens = trace.max_batch_tokens;
  options.max_logit_rows = trace.max_logit_rows;
  options.steps_in_flight = trace.steps_in_flight;
  options.preempt_every = trace.preempt_every;
  auto chunk_random = std::make_shared<std::mt19937_64>(7);
  if (trace.random_chunks) {
    options.chunk_policy = [chunk_random](int64_t, int64_t remaining, int64_t budget) {
      return std::uniform_int_distribution<int64_t>(1, std::min(remaining, budget))(*chunk_random);
    };
  }
  EngineFixture fixture(options);
  std::mt19937_64 random(HashBytes(trace.name));
  std::vector<GenerationSpec> specs;
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  const int count = 250;
  for (int i = 0; i < count; ++i) {
    specs.push_back(RandomSpec(i, &random));
    sinks.push_back(fixture.Submit(specs.back()));
    if (static_cast<int>(random() % 100) < trace.cancel_percent) {
      const size_t victim = random() % specs.size();
      fixture.engine.Cancel(specs[victim].request_id, absl::CancelledError("by the test"));
    }
    if (random() % 8 == 0) sinks[random() % sinks.size()]->WaitTokens(1);
  }
  int64_t finished = 0;
  for (int i = 0; i < count; ++i) {
    const auto index = static_cast<size_t>(i);
    ASSERT_TRUE(sinks[index]->WaitDone()) << i << " " << fixture.transport.error().ToString();
    EXPECT_EQ(sinks[index]->breach(), "");
    if (absl::IsCancelled(sinks[index]->status())) continue;
    ++finished;
    for (int32_t output = 0; output < specs[index].n; ++output) {
      EXPECT_EQ(Difference(*sinks[index], specs[index], output), "") << i << " output " << output;
    }
  }
  ASSERT_TRUE(fixture.WaitIdle());
  EXPECT_OK(fixture.transport.error());
  EXPECT_EQ(Leaks(fixture.engine), "");
  auto counters = fixture.engine.stats().counters;
  EXPECT_EQ(counters["requests_finished"], finished);
  EXPECT_EQ(counters["digest_mismatches"], 0);
  EXPECT_LE(fixture.transport.most_in_flight(), trace.steps_in_flight);
  if (trace.preempt_every > 0 || trace.kv_blocks < 2 * trace.slots) {
    EXPECT_GT(counters["preemptions"], 0);
    EXPECT_GT(counters["digests_checked"], 0);
  }
  if (trace.snapshots > 0) {
    EXPECT_GT(counters["tokens_cached"], 0);
  } else {
    EXPECT_EQ(counters["tokens_cached"], 0);
  }
  if (trace.steps_in_flight == 2) {
    EXPECT_GT(counters["tokens_discarded"], 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Traces, EngineRandomTest,
    ::testing::Values(Trace{"plain", 256, 8, 16, 256, 16, 2, 0, false, 0},
                      Trace{"one_step_in_flight", 256, 8, 16, 256, 16, 1, 0, false, 10},
                      Trace{"cancels", 64, 8, 16, 128, 16, 2, 0, false, 40},
                      Trace{"few_blocks", 8, 8, 4, 128, 16, 2, 0, false, 10},
                      Trace{"few_blocks_no_cache", 8, 8, 0, 64, 8, 2, 0, false, 10},
                      Trace{"preempted_often", 64, 8, 16, 128, 8, 2, 3, false, 10},
                      Trace{"preempted_one_step", 64, 4, 16, 128, 64, 1, 5, true, 10},
                      Trace{"random_chunks", 64, 8, 2, 100, 16, 2, 0, true, 10},
                      Trace{"small_steps", 20, 8, 3, 5, 8, 2, 7, true, 10},
                      Trace{"one_slot", 8, 1, 1, 64, 1, 2, 11, true, 10},
                      Trace{"everything", 10, 6, 2, 40, 7, 2, 4, true, 20}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace testing
}  // namespace lockstep
