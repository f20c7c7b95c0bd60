// The engine over a fake transport: what a request gets, and how it ends.
#include "coordinator/engine.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/engine_test_util.h"
#include "coordinator/errors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/hash.h"
#include "kernels/base/testing/matchers.h"
#include "models/tokenizer/fake_tokenizer.h"

namespace lockstep {
namespace testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace pb = inference::v1;

void ExpectIdle(EngineFixture* fixture) {
  EXPECT_TRUE(fixture->WaitIdle());
  EXPECT_EQ(Leaks(fixture->engine), "");
  EXPECT_OK(fixture->transport.error());
}

absl::Status SubmitTo(EngineFixture* fixture, const GenerationSpec& spec) {
  return fixture->engine.Submit(spec, std::make_shared<RecordingSink>(spec.n));
}

TEST(EngineTest, GeneratesTheModelsTokensAndDigest) {
  EngineOptions options = SmallEngine();
  options.model_name = "model";
  options.server_version = "1.2";
  EngineFixture fixture(options);
  GenerationSpec spec = MakeSpec("a", MakePrompt(10, 1), 20);
  spec.effective_sampling.set_temperature(0.5f);
  auto sink = fixture.Submit(spec);
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_OK(sink->status());
  EXPECT_EQ(Difference(*sink, spec), "");
  const RecordingSink::Output output = sink->output();
  EXPECT_EQ(output.ids.size(), 20u);
  EXPECT_EQ(output.end.reason(), pb::MAX_TOKENS);
  EXPECT_EQ(output.accepted.prompt_tokens(), 10);
  EXPECT_EQ(output.accepted.epoch(), 1u);
  EXPECT_EQ(output.accepted.model(), "model");
  EXPECT_EQ(output.accepted.server_version(), "1.2");
  EXPECT_EQ(output.accepted.effective_sampling().temperature(), 0.5f);
  EXPECT_EQ(output.end.usage().prompt_tokens(), 10);
  EXPECT_EQ(output.end.usage().completion_tokens(), 20);
  EXPECT_EQ(output.end.usage().cached_prompt_tokens(), 0);
  EXPECT_EQ(output.end.preemptions(), 0);
  ExpectIdle(&fixture);
}

TEST(EngineTest, NothingIsPlannedPastMaxTokens) {
  EngineFixture fixture(SmallEngine());
  const GenerationSpec spec = MakeSpec("a", MakePrompt(10, 1), 5);
  ASSERT_TRUE(fixture.Submit(spec)->WaitDone());
  ExpectIdle(&fixture);
  EXPECT_EQ(fixture.transport.steps_sent(), 5);
  EXPECT_EQ(fixture.engine.stats().counters["tokens_discarded"], 0);
}

TEST(EngineTest, StepsAreQueuedOneAheadWithTheTokenSampledOnTheDevice) {
  EngineFixture fixture(SmallEngine());
  fixture.transport.RecordPlans();
  ASSERT_TRUE(fixture.Submit(MakeSpec("a", MakePrompt(10, 1), 6))->WaitDone());
  const auto plans = fixture.transport.plans();
  ASSERT_EQ(plans.size(), 6u);
  EXPECT_EQ(plans[0].sequences(0).token_ids_size(), 10);
  EXPECT_TRUE(plans[0].sequences(0).has_begin());
  for (size_t i = 1; i < plans.size(); ++i) {
    EXPECT_EQ(plans[i].sequences(0).sampled_in_step(), i);
    EXPECT_FALSE(plans[i].sequences(0).has_begin());
  }
  EXPECT_EQ(fixture.transport.most_in_flight(), 2);
}

TEST(EngineTest, OverGeneratedTokensAreDropped) {
  EngineFixture fixture(SmallEngine());
  GenerationSpec spec = MakeSpec("a", MakePrompt(10, 1), 50);
  const auto expected = EngineFixture::Expect(spec);
  spec.stop_token_ids = {expected.ids[7]};
  const auto first = std::find(expected.ids.begin(), expected.ids.end(), expected.ids[7]);
  ASSERT_EQ(first - expected.ids.begin(), 7);
  auto sink = fixture.Submit(spec);
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_EQ(Difference(*sink, spec), "");
  const RecordingSink::Output output = sink->output();
  EXPECT_EQ(output.ids.size(), 7u) << "the stop id is not part of the output";
  EXPECT_EQ(output.end.reason(), pb::STOP_TOKEN);
  EXPECT_EQ(output.end.stop_token_id(), expected.ids[7]);
  EXPECT_EQ(output.end.usage().completion_tokens(), 8);
  ExpectIdle(&fixture);
  EXPECT_EQ(fixture.engine.stats().counters["tokens_discarded"], 1);
}

TEST(EngineTest, ReportsEosAndAFullContext) {
  EngineFixture fixture(SmallEngine());
  GenerationSpec eos = MakeSpec("eos", MakePrompt(10, 1), 50);
  eos.eos_token_ids = {EngineFixture::Expect(eos).ids[3]};
  GenerationSpec full = MakeSpec("full", MakePrompt(10, 2), 4);
  full.max_tokens_is_context = true;
  auto eos_sink = fixture.Submit(eos);
  auto full_sink = fixture.Submit(full);
  ASSERT_TRUE(eos_sink->WaitDone() && full_sink->WaitDone());
  EXPECT_EQ(eos_sink->output().end.reason(), pb::EOS);
  EXPECT_EQ(full_sink->output().end.reason(), pb::CONTEXT_FULL);
}

TEST(EngineTest, EchoComesFirstAndLogprobsComeWithTheirTokens) {
  EngineFixture fixture(SmallEngine());
  GenerationSpec spec = MakeSpec("a", MakePrompt(10, 1), 3);
  spec.echo = true;
  spec.prompt_text = "the prompt";
  spec.sampling.set_num_logprobs(2);
  auto sink = fixture.Submit(spec);
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_EQ(Difference(*sink, spec), "");
  const RecordingSink::Output output = sink->output();
  EXPECT_EQ(output.text, "the prompt");
  ASSERT_EQ(output.logprobs.size(), 3u);
  EXPECT_EQ(output.logprobs[2].token_id(), output.ids[2]);
  EXPECT_EQ(output.logprobs[2].top_size(), 2);
}

TEST(EngineTest, AStopStringEndsTheTextBeforeIt) {
  const FakeTokenizer tokenizer;
  EngineFixture fixture(SmallEngine(), nullptr, &tokenizer);
  GenerationSpec spec = MakeSpec("a", MakePrompt(10, 1), 60);
  for (int32_t id = 'a'; id <= 'z'; ++id) spec.sampling.add_allowed_ids(id);
  spec.detokenize = true;
  std::string text;
  for (const int32_t id : EngineFixture::Expect(spec).ids) text += static_cast<char>(id);
  const std::string stop = text.substr(20, 3);
  spec.stop_strings = {stop};
  auto sink = fixture.Submit(spec);
  ASSERT_TRUE(sink->WaitDone());
  const RecordingSink::Output output = sink->output();
  EXPECT_EQ(Difference(*sink, spec), "");
  EXPECT_EQ(output.text, text.substr(0, text.find(stop)));
  EXPECT_EQ(output.end.reason(), pb::STOP_TEXT);
  EXPECT_EQ(output.end.stop_text(), stop);
  ExpectIdle(&fixture);
  EXPECT_EQ(fixture.engine.stats().counters["tokens_discarded"], 1);
}

TEST(EngineTest, SeveralOutputsMeetInThePrefixCache) {
  EngineFixture fixture(SmallEngine());
  GenerationSpec spec = MakeSpec("a", MakePrompt(150, 1), 10);
  spec.n = 3;
  auto sink = fixture.Submit(spec);
  ASSERT_TRUE(sink->WaitDone());
  for (int32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(Difference(*sink, spec, i), "");
    EXPECT_EQ(sink->output(i).end.usage().cached_prompt_tokens(), i == 0 ? 0 : 128);
  }
  EXPECT_NE(sink->output(0).ids, sink->output(1).ids);
  ExpectIdle(&fixture);
}

TEST(EngineTest, AFinishedPromptIsReusedUnlessBypassedOrSalted) {
  EngineFixture fixture(SmallEngine());
  const auto cached = [&](GenerationSpec spec, const std::string& id) {
    spec.request_id = id;
    auto sink = fixture.Submit(spec);
    EXPECT_TRUE(sink->WaitDone());
    EXPECT_EQ(Difference(*sink, spec), "") << id;
    return sink->output().end.usage().cached_prompt_tokens();
  };
  GenerationSpec spec = MakeSpec("a", MakePrompt(300, 1), 5);
  EXPECT_EQ(cached(spec, "cold"), 0);
  EXPECT_EQ(cached(spec, "warm"), 256);
  GenerationSpec salted = spec;
  salted.cache_salt = "other";
  EXPECT_EQ(cached(salted, "salted"), 0);
  GenerationSpec bypass = spec;
  bypass.cache_bypass = true;
  EXPECT_EQ(cached(bypass, "bypass"), 0);
  // The whole prompt but its last token is never taken from the cache.
  GenerationSpec shorter = spec;
  shorter.prompt_ids.resize(256);
  EXPECT_EQ(cached(shorter, "shorter"), 128) << "the snapshot of the interval, not that of 256";
  GenerationSpec fork = spec;
  fork.prompt_ids[200] += 1;
  EXPECT_EQ(cached(fork, "fork"), 192) << "where `shorter` left a snapshot";
  fork.prompt_ids[150] += 1;
  EXPECT_EQ(cached(fork, "early fork"), 128);
  fork.prompt_ids[100] += 1;
  EXPECT_EQ(cached(fork, "earlier fork"), 0);
  ExpectIdle(&fixture);
}

TEST(EngineTest, LongPromptsAreCutByTheBudgetAndDecodesGoFirst) {
  EngineFixture fixture(SmallEngine());
  fixture.transport.RecordPlans();
  fixture.transport.Pause();  // so that the first one still decodes when the second one comes
  fixture.transport.Allow(2);
  const GenerationSpec decoding = MakeSpec("a", MakePrompt(5, 1), 60);
  auto first = fixture.Submit(decoding);
  ASSERT_TRUE(first->WaitTokens(2));
  const GenerationSpec prompt = MakeSpec("b", MakePrompt(400, 2), 2);
  auto second = fixture.Submit(prompt);
  fixture.transport.Resume();
  ASSERT_TRUE(first->WaitDone() && second->WaitDone());
  EXPECT_EQ(Difference(*first, decoding), "");
  EXPECT_EQ(Difference(*second, prompt), "");
  bool mixed = false;
  for (const auto& plan : fixture.transport.plans()) {
    if (plan.sequences_size() != 2) continue;
    mixed = true;
    EXPECT_EQ(plan.sequences(0).slot(), fixture.transport.plans()[0].sequences(0).slot());
    EXPECT_LE(plan.sequences(1).token_ids_size(), 127);
  }
  EXPECT_TRUE(mixed);
}

TEST(EngineTest, APreemptedSequenceIsReplayedAndItsDigestsCompared) {
  EngineOptions options = SmallEngine();
  options.preempt_every = 4;
  options.max_logit_rows = 4;
  EngineFixture fixture(options);
  const GenerationSpec spec = MakeSpec("a", MakePrompt(100, 1), 40);
  auto sink = fixture.Submit(spec);
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_EQ(Difference(*sink, spec), "");
  EXPECT_GT(sink->output().end.preemptions(), 1);
  ExpectIdle(&fixture);
  auto counters = fixture.engine.stats().counters;
  EXPECT_EQ(counters["preemptions"], sink->output().end.preemptions());
  EXPECT_GT(counters["digests_checked"], 0);
  EXPECT_GT(counters["tokens_replayed"], 0);
  EXPECT_EQ(counters["tokens_prefilled"], 100);
  EXPECT_EQ(counters["digest_mismatches"], 0);
}

TEST(EngineTest, AReplayWithAnotherDigestFailsTheRequest) {
  EngineOptions options = SmallEngine();
  options.preempt_every = 4;
  options.max_logit_rows = 64;
  EngineFixture fixture(options,
                        [](const worker::v1::StepPlan& plan, worker::v1::StepResult* result) {
                          for (int i = 0; i < plan.sequences_size(); ++i) {
                            const auto& entry = plan.sequences(i);
                            if (!entry.has_begin() || entry.begin().output_ids_size() < 3) continue;
                            auto* digests = result->mutable_sequences(i)->mutable_digests();
                            if (digests->size() > 2) digests->Set(1, digests->Get(1) + 1);
                          }
                        });
  auto sink = fixture.Submit(MakeSpec("a", MakePrompt(30, 1), 40));
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_THAT(sink->status(),
              StatusIs(absl::StatusCode::kInternal,
                       AllOf(HasSubstr("replay of output 0"), HasSubstr("generated token 1"))));
  EXPECT_EQ(ReasonOf(sink->status()), "DIGEST_MISMATCH");
  ExpectIdle(&fixture);
  EXPECT_EQ(fixture.engine.stats().counters["digest_mismatches"], 1);
}

TEST(EngineTest, WhenBlocksRunOutTheYoungestIsPreempted) {
  EngineOptions options = SmallEngine();
  options.kv_blocks = 6;
  options.snapshots = 0;
  options.max_logit_rows = 128;
  EngineFixture fixture(options);
  std::vector<GenerationSpec> specs;
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 3; ++i) {
    specs.push_back(
        MakeSpec(absl::StrCat("r", i), MakePrompt(100, 1 + static_cast<uint64_t>(i)), 200));
    sinks.push_back(fixture.Submit(specs.back()));
  }
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(sinks[i]->WaitDone());
    EXPECT_EQ(Difference(*sinks[i], specs[i]), "");
  }
  EXPECT_EQ(sinks[0]->output().end.preemptions(), 0) << "the oldest is never preempted";
  EXPECT_GT(sinks[2]->output().end.preemptions(), 0);
  ExpectIdle(&fixture);
}

TEST(EngineTest, NanLogitsFailOneRequestAndItsBlocksAreNotReused) {
  std::atomic<bool> poison{true};
  EngineFixture fixture(SmallEngine(),
                        [&](const worker::v1::StepPlan& plan, worker::v1::StepResult* result) {
                          for (int i = 0; i < plan.sequences_size(); ++i) {
                            const auto& entry = plan.sequences(i);
                            if (poison && entry.position() == 0 && entry.token_ids_size() == 100) {
                              result->mutable_sequences(i)->set_nan(true);
                              result->mutable_sequences(i)->set_sampled_id(-1);
                            }
                          }
                        });
  const GenerationSpec good = MakeSpec("good", MakePrompt(20, 1), 30);
  GenerationSpec bad = MakeSpec("bad", MakePrompt(100, 2), 30);
  auto good_sink = fixture.Submit(good);
  auto bad_sink = fixture.Submit(bad);
  ASSERT_TRUE(good_sink->WaitDone() && bad_sink->WaitDone());
  EXPECT_EQ(Difference(*good_sink, good), "");
  EXPECT_THAT(bad_sink->status(), StatusIs(absl::StatusCode::kInternal, HasSubstr("NaN")));
  EXPECT_EQ(ReasonOf(bad_sink->status()), "NUMERIC_NAN");
  ExpectIdle(&fixture);
  EXPECT_EQ(fixture.engine.stats().counters["nan_logits"], 1);
  poison = false;
  bad.request_id = "again";
  auto again = fixture.Submit(bad);
  ASSERT_TRUE(again->WaitDone());
  EXPECT_EQ(Difference(*again, bad), "");
  EXPECT_EQ(again->output().end.usage().cached_prompt_tokens(), 0);
}

TEST(EngineTest, MasksThatLeaveNothingFailTheRequest) {
  EngineFixture fixture(SmallEngine());
  GenerationSpec spec = MakeSpec("a", MakePrompt(10, 1), 5);
  spec.sampling.add_allowed_ids(5);
  spec.sampling.add_banned_ids(5);
  auto sink = fixture.Submit(spec);
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_THAT(sink->status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no id left to choose")));
  EXPECT_EQ(ReasonOf(sink->status()), "CONSTRAINT_UNSATISFIABLE");
  ExpectIdle(&fixture);
}

TEST(EngineTest, RefusesWhatCanNeverFit) {
  EngineOptions options = SmallEngine();
  options.kv_blocks = 4;
  EngineFixture fixture(options);
  const absl::Status status = SubmitTo(&fixture, MakeSpec("a", MakePrompt(200, 1), 58));
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                               HasSubstr("200 prompt tokens and 58 new ones need 5 KV blocks")));
  EXPECT_EQ(ReasonOf(status), "KV_CAPACITY_IMPOSSIBLE");
  const GenerationSpec fits = MakeSpec("b", MakePrompt(200, 1), 57);
  auto sink = fixture.Submit(fits);
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_EQ(Difference(*sink, fits), "");
}

TEST(EngineTest, RefusesAnIdThatIsInUseOrWasUsed) {
  EngineFixture fixture(SmallEngine());
  fixture.transport.Pause();
  const GenerationSpec spec = MakeSpec("a", MakePrompt(10, 1), 5);
  auto sink = fixture.Submit(spec);
  const absl::Status running = SubmitTo(&fixture, spec);
  EXPECT_THAT(running, StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("in use")));
  EXPECT_EQ(ReasonOf(running), "REQUEST_ID_REUSED");
  fixture.transport.Resume();
  ASSERT_TRUE(sink->WaitDone());
  GenerationSpec other = spec;
  other.body_digest += 1;
  EXPECT_THAT(SubmitTo(&fixture, other),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("with another body")));
}

TEST(EngineTest, ACancelledRequestFreesItsId) {
  EngineFixture fixture(SmallEngine());
  GenerationSpec spec = MakeSpec("a", MakePrompt(10, 1), 5);
  for (int i = 0; i < 3; ++i) {
    fixture.transport.Pause();
    auto sink = fixture.Submit(spec);
    EXPECT_EQ(fixture.engine.Cancel("a", absl::CancelledError("stop")),
              Engine::CancelOutcome::kCancelled);
    fixture.transport.Resume();
    ASSERT_TRUE(sink->WaitDone());
    EXPECT_THAT(sink->status(), StatusIs(absl::StatusCode::kCancelled));
    EXPECT_EQ(fixture.engine.Cancel("a", absl::CancelledError("stop")),
              Engine::CancelOutcome::kAlreadyFinished);
    spec.body_digest += 1;
  }
  auto sink = fixture.Submit(spec);
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_EQ(Difference(*sink, spec), "");
  ASSERT_TRUE(fixture.WaitIdle());
  EXPECT_EQ(Leaks(fixture.engine), "");
}

TEST(EngineTest, RefusesWhenTheQueueIsFull) {
  EngineOptions options = SmallEngine();
  options.slots = 1;
  options.max_queued_requests = 2;
  options.max_queued_tokens = 100;
  EngineFixture fixture(options);
  fixture.transport.Pause();
  auto running = fixture.Submit(MakeSpec("r", MakePrompt(10, 1), 5));
  while (fixture.engine.stats().requests_running == 0) absl::SleepFor(absl::Milliseconds(1));
  auto first = fixture.Submit(MakeSpec("q1", MakePrompt(60, 1), 5));
  const absl::Status tokens = SubmitTo(&fixture, MakeSpec("q2", MakePrompt(60, 1), 5));
  EXPECT_THAT(tokens,
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("60 prompt tokens")));
  EXPECT_EQ(ReasonOf(tokens), "QUEUE_FULL");
  auto second = fixture.Submit(MakeSpec("q3", MakePrompt(10, 1), 5));
  EXPECT_THAT(SubmitTo(&fixture, MakeSpec("q4", MakePrompt(1, 1), 5)),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("2 requests")));
  EXPECT_EQ(fixture.engine.stats().requests_queued, 2);
  fixture.transport.Resume();
  ASSERT_TRUE(running->WaitDone() && first->WaitDone() && second->WaitDone());
  ExpectIdle(&fixture);
}

TEST(EngineTest, DrainRefusesNewRequestsAndFinishesOldOnes) {
  EngineFixture fixture(SmallEngine());
  fixture.transport.Pause();
  const GenerationSpec spec = MakeSpec("a", MakePrompt(10, 1), 5);
  auto sink = fixture.Submit(spec);
  fixture.engine.Drain();
  EXPECT_TRUE(fixture.engine.draining());
  const absl::Status status = SubmitTo(&fixture, MakeSpec("b", MakePrompt(10, 1), 5));
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(ReasonOf(status), "DRAINING");
  fixture.transport.Resume();
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_EQ(Difference(*sink, spec), "");
  fixture.engine.Undrain();
  EXPECT_OK(SubmitTo(&fixture, MakeSpec("c", MakePrompt(10, 1), 5)));
  ExpectIdle(&fixture);
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
