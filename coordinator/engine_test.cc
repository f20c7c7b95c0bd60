// The engine over a fake transport: what a request gets, and how it ends.
#include "coordinator/engine.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/engine_test_util.h"
#include "coordinator/errors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/hash.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace testing {
namespace {

using ::testing::HasSubstr;
namespace pb = inference::v1;

TEST(EngineTest, GeneratesTheModelsTokensAndDigest) {
  EngineFixture fixture(SmallEngine());
  const GenerationSpec spec = MakeSpec("a", MakePrompt(10, 1), 20);
  auto sink = fixture.Submit(spec);
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_OK(sink->status());
  EXPECT_EQ(Difference(*sink, spec), "");
  const RecordingSink::Output output = sink->output();
  EXPECT_EQ(output.ids.size(), 20u);
  EXPECT_EQ(output.end.reason(), pb::MAX_TOKENS);
  EXPECT_EQ(output.accepted.prompt_tokens(), 10);
  EXPECT_EQ(output.accepted.epoch(), 1u);
  EXPECT_EQ(output.end.usage().prompt_tokens(), 10);
  EXPECT_EQ(output.end.usage().completion_tokens(), 20);
  EXPECT_EQ(output.end.usage().cached_prompt_tokens(), 0);
  EXPECT_TRUE(fixture.WaitIdle());
  EXPECT_EQ(Leaks(fixture.engine), "");
  EXPECT_OK(fixture.transport.error());
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
