// How requests end before they finish: cancellation at every step boundary, deadlines, a transport
// that fails, a server that stops.
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/engine.h"
#include "coordinator/engine_test_util.h"
#include "coordinator/errors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace testing {
namespace {

using ::testing::HasSubstr;

void ExpectIdle(EngineFixture* fixture) {
  EXPECT_TRUE(fixture->WaitIdle());
  EXPECT_EQ(Leaks(fixture->engine), "");
}

// A clock that tests move.
class ManualClock {
 public:
  std::function<absl::Time()> function() {
    return [this] {
      std::lock_guard<std::mutex> lock(mu_);
      return now_;
    };
  }
  void Advance(absl::Duration duration) {
    std::lock_guard<std::mutex> lock(mu_);
    now_ += duration;
  }
  absl::Time now() { return function()(); }

 private:
  std::mutex mu_;
  absl::Time now_ = absl::FromUnixSeconds(1000000);
};

class EngineCancelTest : public ::testing::TestWithParam<int> {};

// Cancels after so many results, while the next ones are in flight; 0: before the first, and far
// ones after the end.
TEST_P(EngineCancelTest, AtAnyStepLeavesTheOthersAloneAndLeaksNothing) {
  const int after = GetParam();
  EngineFixture fixture(SmallEngine());
  const GenerationSpec victim = MakeSpec("victim", MakePrompt(150, 1), 6);
  const GenerationSpec other = MakeSpec("other", MakePrompt(70, 2), 12);
  fixture.transport.Pause();
  auto victim_sink = fixture.Submit(victim);
  auto other_sink = fixture.Submit(other);
  fixture.transport.Allow(after);
  for (int i = 0; i < 10000 && fixture.transport.steps_received() < after; ++i) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  ASSERT_EQ(fixture.transport.steps_received(), after);
  const auto outcome = fixture.engine.Cancel("victim", absl::CancelledError("by the test"));
  if (outcome == Engine::CancelOutcome::kCancelled) {
    // Without another result.
    ASSERT_TRUE(victim_sink->WaitDone());
    EXPECT_THAT(victim_sink->status(),
                StatusIs(absl::StatusCode::kCancelled, HasSubstr("by the test")));
  } else {
    EXPECT_EQ(outcome, Engine::CancelOutcome::kAlreadyFinished);
    EXPECT_EQ(Difference(*victim_sink, victim), "");
  }
  EXPECT_EQ(fixture.engine.Cancel("victim", absl::CancelledError("again")),
            Engine::CancelOutcome::kAlreadyFinished);
  fixture.transport.Resume();
  ASSERT_TRUE(other_sink->WaitDone());
  EXPECT_EQ(Difference(*other_sink, other), "");
  EXPECT_EQ(victim_sink->breach(), "");
  ExpectIdle(&fixture);
  EXPECT_OK(fixture.transport.error());
}

INSTANTIATE_TEST_SUITE_P(Steps, EngineCancelTest, ::testing::Range(0, 11));

TEST(EngineEndTest, CancelOfAQueuedRequestDisturbsNobody) {
  EngineOptions options = SmallEngine();
  options.slots = 1;
  EngineFixture fixture(options);
  fixture.transport.Pause();
  const GenerationSpec running = MakeSpec("running", MakePrompt(10, 1), 8);
  const GenerationSpec behind = MakeSpec("behind", MakePrompt(10, 2), 8);
  auto running_sink = fixture.Submit(running);
  auto queued_sink = fixture.Submit(MakeSpec("queued", MakePrompt(10, 3), 8));
  auto behind_sink = fixture.Submit(behind);
  EXPECT_EQ(fixture.engine.Cancel("queued", absl::CancelledError("by the test")),
            Engine::CancelOutcome::kCancelled);
  ASSERT_TRUE(queued_sink->WaitDone());
  EXPECT_FALSE(running_sink->done());
  fixture.transport.Resume();
  ASSERT_TRUE(running_sink->WaitDone() && behind_sink->WaitDone());
  EXPECT_EQ(Difference(*running_sink, running), "");
  EXPECT_EQ(Difference(*behind_sink, behind), "");
  EXPECT_EQ(fixture.engine.Cancel("nobody", absl::CancelledError("")),
            Engine::CancelOutcome::kNotFound);
  ExpectIdle(&fixture);
}

TEST(EngineEndTest, AQueueDeadlineEndsOnlyWhatWaits) {
  ManualClock clock;
  EngineOptions options = SmallEngine();
  options.slots = 1;
  options.clock = clock.function();
  EngineFixture fixture(options);
  fixture.transport.Pause();
  GenerationSpec running = MakeSpec("running", MakePrompt(10, 1), 8);
  running.queue_deadline = clock.now() + absl::Seconds(5);
  auto running_sink = fixture.Submit(running);
  while (fixture.engine.stats().requests_running == 0) absl::SleepFor(absl::Milliseconds(1));
  GenerationSpec waiting = running;
  waiting.request_id = "waiting";
  auto waiting_sink = fixture.Submit(waiting);
  clock.Advance(absl::Seconds(6));
  ASSERT_TRUE(waiting_sink->WaitDone());
  EXPECT_THAT(waiting_sink->status(),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("waited 6s in the queue")));
  EXPECT_EQ(ReasonOf(waiting_sink->status()), "DEADLINE_UNMEETABLE");
  fixture.transport.Resume();
  ASSERT_TRUE(running_sink->WaitDone());
  EXPECT_EQ(Difference(*running_sink, running), "");
  ExpectIdle(&fixture);
}

TEST(EngineEndTest, ADeadlineEndsARunningRequestAndFreesItsBlocks) {
  ManualClock clock;
  EngineOptions options = SmallEngine();
  options.clock = clock.function();
  EngineFixture fixture(options);
  GenerationSpec spec = MakeSpec("a", MakePrompt(10, 1), 1000);
  spec.deadline = clock.now() + absl::Seconds(5);
  fixture.transport.Pause();
  fixture.transport.Allow(3);
  auto sink = fixture.Submit(spec);
  ASSERT_TRUE(sink->WaitTokens(3));
  clock.Advance(absl::Seconds(5));
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_THAT(sink->status(), StatusIs(absl::StatusCode::kDeadlineExceeded,
                                       HasSubstr("when 3 tokens had been generated")));
  EXPECT_EQ(sink->breach(), "");
  fixture.transport.Resume();
  ExpectIdle(&fixture);
  EXPECT_EQ(fixture.engine.stats().counters["requests_failed"], 1);
}

void ExpectFailed(EngineFixture* fixture, const std::shared_ptr<RecordingSink>& sink) {
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_THAT(sink->status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("rank 1 went away")));
  EXPECT_EQ(ReasonOf(sink->status()), "ENGINE_FAILED");
  EXPECT_EQ(sink->breach(), "");
  ExpectIdle(fixture);
  EXPECT_THAT(fixture->engine.Ready(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("rank 1 went away")));
  const absl::Status refused = fixture->engine.Submit(MakeSpec("late", MakePrompt(10, 1), 5),
                                                      std::make_shared<RecordingSink>());
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(ReasonOf(refused), "ENGINE_FAILED");
}

TEST(EngineEndTest, AFailedTransportEndsAllRequests) {
  for (const bool send : {false, true}) {
    EngineFixture fixture(SmallEngine());
    EXPECT_OK(fixture.engine.Ready());
    const absl::Status cause = absl::UnavailableError("rank 1 went away");
    send ? fixture.transport.FailSend(4, cause) : fixture.transport.FailReceive(4, cause);
    auto first = fixture.Submit(MakeSpec("a", MakePrompt(150, 1), 500));
    ExpectFailed(&fixture, first);
  }
}

TEST(EngineEndTest, AResultThatIsNotTheStepsOwnIsAFailedTransport) {
  EngineFixture fixture(SmallEngine(),
                        [](const worker::v1::StepPlan&, worker::v1::StepResult* result) {
                          if (result->step_id() == 3) result->set_batch_digest(1);
                        });
  auto sink = fixture.Submit(MakeSpec("a", MakePrompt(150, 1), 50));
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_THAT(sink->status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("not the one of step 3")));
  ExpectIdle(&fixture);
}

TEST(EngineEndTest, StopEndsWhatRunsAndWhatIsQueued) {
  auto fixture = std::make_unique<EngineFixture>(SmallEngine());
  fixture->transport.Pause();
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 8; ++i) {
    sinks.push_back(fixture->Submit(MakeSpec(absl::StrCat(i), MakePrompt(10, 1), 5)));
  }
  fixture->engine.Stop(absl::UnavailableError("stopped by the test"));
  for (const auto& sink : sinks) {
    EXPECT_TRUE(sink->done());
    EXPECT_EQ(sink.use_count(), 1) << "the engine has let go of the sink";
    EXPECT_THAT(sink->status(),
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr("stopped by the test")));
    EXPECT_EQ(sink->breach(), "");
  }
  EXPECT_EQ(Leaks(fixture->engine), "");
  EXPECT_FALSE(fixture->engine.Ready().ok());
}

TEST(EngineEndTest, AnEngineThatNeverStartedEndsItsRequests) {
  const EngineOptions options = SmallEngine();
  FakeStepTransport transport((FakeStepOptions()));
  auto sink = std::make_shared<RecordingSink>();
  {
    Engine engine(options, &transport, nullptr);
    EXPECT_OK(engine.Submit(MakeSpec("a", MakePrompt(10, 1), 5), sink));
  }
  EXPECT_TRUE(sink->done());
  EXPECT_EQ(ReasonOf(sink->status()), "DRAINING");
}

// A rank whose report is not what it agreed on with the others is not believed, whatever it says.
TEST(EngineEndTest, ResultsThatDoNotGiveTheirDigestBreakTheGroup) {
  for (const bool id : {true, false}) {
    EngineOptions options = SmallEngine();
    FakeStepOptions steps;
    steps.kv_blocks = options.kv_blocks;
    steps.slots = options.slots;
    steps.snapshots = options.snapshots;
    steps.max_batch_tokens = options.max_batch_tokens;
    steps.max_logit_rows = options.slots;
    steps.change_agreed = [id](worker::v1::StepResult* result) {
      if (result->step_id() != 3) return;
      worker::v1::SequenceResult* sequence = result->mutable_sequences(0);
      if (id) {
        sequence->set_sampled_id(sequence->sampled_id() + 1);
      } else {
        sequence->set_digests(0, sequence->digests(0) + 1);
      }
    };
    FakeStepTransport transport(steps);
    Engine engine(options, &transport, nullptr);
    engine.Start(1, 1);
    const GenerationSpec spec = MakeSpec("victim", MakePrompt(20, 1), 12);
    auto sink = std::make_shared<RecordingSink>();
    ASSERT_OK(engine.Submit(spec, sink));
    ASSERT_TRUE(sink->WaitDone());
    EXPECT_THAT(sink->status(), StatusIs(absl::StatusCode::kUnavailable,
                                         HasSubstr("not the ones that the ranks agreed on")));
    EXPECT_EQ(sink->output().ids.size(), 2u) << "nothing of step 3 was shown";
    engine.Stop(absl::OkStatus());
  }
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
