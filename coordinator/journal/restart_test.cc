// Coordinators that die and come back on the same journal, as engines over a fake transport: every
// answer is the one of an undisturbed run, event for event.
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "coordinator/engine.h"
#include "coordinator/engine_test_util.h"
#include "coordinator/fake_step_transport.h"
#include "coordinator/generation_log.h"
#include "coordinator/journal/fake_storage.h"
#include "coordinator/journal/journal.h"
#include "coordinator/restore.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "models/tokenizer/fake_tokenizer.h"

namespace lockstep {
namespace testing {
namespace {

using google::protobuf::util::MessageDifferencer;
using inference::v1::GenerateEvent;
using Events = std::map<int32_t, std::vector<GenerateEvent>>;  // of each output

constexpr uint64_t kModel = 1;
constexpr absl::Duration kPatience = absl::Seconds(30);

FakeStepOptions TransportFor(const EngineOptions& options, uint64_t term) {
  FakeStepOptions fake;
  fake.kv_blocks = options.kv_blocks;
  fake.slots = options.slots;
  fake.snapshots = options.snapshots;
  fake.max_batch_tokens = options.max_batch_tokens;
  fake.max_logit_rows = std::max(options.max_logit_rows, options.slots);
  fake.term = term;
  return fake;
}

// What was shown so far, without what tells of its history.
Events Shown(const std::shared_ptr<GenerationLog>& log) {
  Events events;
  GenerationLog::Reader reader(log, {}, {});
  GenerateEvent event;
  absl::Status end;
  while (reader.Next(&event, &end) == GenerationLog::Reader::Outcome::kEvent) {
    if (event.has_finished()) {
      event.mutable_finished()->clear_timings();
      event.mutable_finished()->clear_recoveries();
      event.mutable_finished()->mutable_usage()->clear_cached_prompt_tokens();
    }
    events[event.output_index()].push_back(event);
  }
  return events;
}

// `part` is the beginning of `whole`, in every output. "" when it is.
std::string Differs(const Events& part, const Events& whole, bool all) {
  for (const auto& [output, events] : whole) {
    const auto found = part.find(output);
    const size_t count = found == part.end() ? 0 : found->second.size();
    if (count > events.size() || (all && count != events.size())) {
      return "output " + std::to_string(output) + " has " + std::to_string(count) + " events of " +
             std::to_string(events.size());
    }
    for (size_t i = 0; i < count; ++i) {
      if (MessageDifferencer::Equals(found->second[i], events[i])) continue;
      return found->second[i].ShortDebugString() + " is not " + events[i].ShortDebugString();
    }
  }
  return "";
}

// One life of a coordinator.
class Process {
 public:
  Process(FakeDisk* disk, const EngineOptions& options, const Tokenizer* tokenizer, uint64_t term)
      : disk_(disk),
        transport(TransportFor(options, term)),
        engine(options, &transport, tokenizer) {
    transport.Pause();
    JournalOptions journal_options;
    journal_options.sync = JournalSync::kOff;
    auto opened = Journal::Open(journal_options, disk->Mount());
    EXPECT_OK(opened);
    journal = *std::move(opened);
    auto read = journal->Begin(kModel, [this](const std::string& id, const absl::Status& status) {
      engine.Cancel(id, status);
    });
    EXPECT_OK(read);
    for (const Journal::Restored& restored : *read) {
      const GenerationSpec& spec = restored.request.spec;
      auto& log = logs[spec.request_id];
      log = std::make_shared<GenerationLog>(spec.request_id, spec.n);
      if (restored.sink == nullptr) {
        ReplayEnded(restored.request, tokenizer, log.get());
      } else {
        engine.Restore(restored.request, log.get(), Journal::WrapRestored(restored, log));
      }
    }
    engine.Start(term, 1);
  }

  void Submit(const GenerationSpec& spec) {
    auto& log = logs[spec.request_id];
    log = std::make_shared<GenerationLog>(spec.request_id, spec.n);
    EXPECT_OK(engine.Submit(spec, journal->Wrap(spec, log)));
  }
  // Lets `steps` results through and waits until the engine has them, or all is done.
  void Run(int64_t steps) {
    const int64_t before = transport.steps_received();
    transport.Allow(steps);
    const absl::Time deadline = absl::Now() + kPatience;
    while (transport.steps_received() < before + steps && !engine.idle() &&
           absl::Now() < deadline) {
      absl::SleepFor(absl::Microseconds(100));
    }
  }
  bool WaitAll() {
    transport.Resume();
    const absl::Time deadline = absl::Now() + kPatience;
    const auto ended = [](const auto& log) { return log.second->end().has_value(); };
    while (!std::all_of(logs.begin(), logs.end(), ended)) {
      if (absl::Now() > deadline) return false;
      absl::SleepFor(absl::Microseconds(100));
    }
    return true;
  }
  // The process is gone: what was written stays.
  void Die() {
    journal->Stop();
    const auto files = disk_->files();
    engine.Stop(absl::UnavailableError("dead"));
    disk_->SetFiles(files);
  }

 private:
  FakeDisk* const disk_;

 public:
  FakeStepTransport transport;
  std::unique_ptr<Journal> journal;
  Engine engine;
  std::map<std::string, std::shared_ptr<GenerationLog>> logs;
};

class RestartTest : public ::testing::Test {
 protected:
  RestartTest() {
    options_ = SmallEngine();
    options_.model_name = "m";
    // Seeded sampling with penalties and min_tokens, log-probabilities, an echo, two outputs that
    // end at different places, a stop string that is held back.
    GenerationSpec rich = MakeSpec("rich", MakePrompt(20, 1), 16);
    rich.n = 2;
    rich.echo = true;
    rich.prompt_text = "the prompt";
    rich.detokenize = true;
    rich.min_tokens = 6;
    rich.stop_strings = {"zzqxy"};
    rich.effective_sampling.set_seed(3);
    for (int32_t id = 'a'; id <= 'z'; ++id) rich.sampling.add_allowed_ids(id);
    rich.sampling.set_temperature(0.7f);
    rich.sampling.set_presence_penalty(0.5f);
    rich.sampling.set_frequency_penalty(0.25f);
    rich.sampling.set_repetition_penalty(1.1f);
    rich.sampling.set_min_tokens(6);
    rich.sampling.set_num_logprobs(2);
    const std::vector<int32_t> ids = EngineFixture::Expect(rich, 1).ids;
    rich.eos_token_ids = {ids[10]};
    rich.sampling.add_stop_ids(ids[10]);
    specs_ = {rich, MakeSpec("long", MakePrompt(300, 2), 9),
              MakeSpec("short", MakePrompt(5, 3), 2)};
    FakeDisk disk;
    Process undisturbed(&disk, options_, &tokenizer_, 1);
    for (const GenerationSpec& spec : specs_) undisturbed.Submit(spec);
    EXPECT_TRUE(undisturbed.WaitAll());
    for (const auto& [id, log] : undisturbed.logs) {
      EXPECT_OK(*log->end());
      expected_[id] = Shown(log);
    }
    EXPECT_GT(expected_["rich"][0].size(), 6u);
    undisturbed.Die();
  }

  void ExpectAll(const Process& process, bool all) {
    for (const auto& [id, log] : process.logs) {
      EXPECT_EQ(Differs(Shown(log), expected_.at(id), all), "") << id;
      EXPECT_TRUE(!all || log->end()->ok()) << id;
    }
  }

  EngineOptions options_;
  FakeTokenizer tokenizer_;
  std::vector<GenerationSpec> specs_;
  std::map<std::string, Events> expected_;
};

TEST_F(RestartTest, AfterADeathAtAnyStepEveryAnswerIsTheUndisturbedOne) {
  bool over = false;
  for (int64_t steps = 0; !over; ++steps) {
    SCOPED_TRACE(steps);
    ASSERT_LT(steps, 100);
    FakeDisk disk;
    std::map<std::string, std::vector<uint64_t>> shown;
    {
      Process first(&disk, options_, &tokenizer_, 1);
      for (const GenerationSpec& spec : specs_) first.Submit(spec);
      first.Run(steps);
      over = first.engine.idle();
      first.Die();
      ExpectAll(first, false);
      for (const auto& [id, log] : first.logs) shown[id] = log->last_sequence();
    }
    Process second(&disk, options_, &tokenizer_, 2);
    // Everything that was shown is there before any step has run.
    for (const auto& [id, last] : shown) {
      if (last[0] == 0) continue;  // it died before the client heard that it was accepted
      ASSERT_EQ(second.logs.count(id), 1u) << id;
      const std::vector<uint64_t> now = second.logs.at(id)->last_sequence();
      for (size_t output = 0; output < last.size(); ++output) EXPECT_GE(now[output], last[output]);
    }
    ExpectAll(second, false);
    ASSERT_TRUE(second.WaitAll());
    ExpectAll(second, true);
    EXPECT_OK(second.transport.error());
    EXPECT_EQ(second.engine.stats().counters["digest_mismatches"], 0);
    second.Die();
  }
}

TEST_F(RestartTest, ACoordinatorThatDiesAgainAndAgainComesToTheEnd) {
  FakeDisk disk;
  uint64_t term = 1;
  {
    Process first(&disk, options_, &tokenizer_, term);
    for (const GenerationSpec& spec : specs_) first.Submit(spec);
    first.Run(3);
    first.Die();
  }
  int64_t checked = 0;
  for (bool over = false; !over;) {
    ASSERT_LT(term, 100u);
    Process next(&disk, options_, &tokenizer_, ++term);
    ExpectAll(next, false);
    next.Run(5);  // the replay, and a little more
    over = next.engine.idle();
    if (over) {
      ASSERT_TRUE(next.WaitAll());
      ExpectAll(next, true);
    }
    checked += next.engine.stats().counters["digests_checked"];
    EXPECT_OK(next.transport.error());
    next.Die();
  }
  EXPECT_GE(term, 3u);
  EXPECT_GT(checked, 5) << "replays compare their digests with the log";
}

TEST_F(RestartTest, AJournalThatTheModelDoesNotConfirmFailsTheRequest) {
  FakeDisk disk;
  {
    Process first(&disk, options_, &tokenizer_, 1);
    first.Submit(specs_[0]);
    first.Run(6);
    first.Die();
  }
  auto opened = Journal::Open(JournalOptions(), disk.Mount());
  ASSERT_OK(opened);
  auto read = (*opened)->Begin(kModel, nullptr);
  ASSERT_OK(read);
  ASSERT_EQ(read->size(), 1u);
  RestoredRequest request = (*read)[0].request;
  ASSERT_GT(request.outputs[0].digests.size(), 2u);
  request.outputs[0].digests[1] ^= 1;
  FakeStepTransport transport(TransportFor(options_, 2));
  Engine engine(options_, &transport, &tokenizer_);
  auto log = std::make_shared<GenerationLog>("rich", 2);
  engine.Restore(request, log.get(), log);
  engine.Start(2, 1);
  const absl::Time deadline = absl::Now() + kPatience;
  while (!log->end().has_value() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  ASSERT_TRUE(log->end().has_value());
  EXPECT_THAT(*log->end(),
              StatusIs(absl::StatusCode::kInternal, ::testing::HasSubstr("the log has")));
}

TEST_F(RestartTest, ARequestThatDoesNotFitAnyMoreIsToldSo) {
  FakeDisk disk;
  {
    Process first(&disk, options_, &tokenizer_, 1);
    for (const GenerationSpec& spec : specs_) first.Submit(spec);
    first.Run(3);
    first.Die();
  }
  options_.kv_blocks = 4;
  Process second(&disk, options_, &tokenizer_, 2);
  ASSERT_TRUE(second.WaitAll());
  EXPECT_THAT(*second.logs.at("long")->end(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       ::testing::HasSubstr("restored from the journal")));
  EXPECT_OK(*second.logs.at("short")->end());
  EXPECT_OK(*second.logs.at("rich")->end());
  EXPECT_EQ(Leaks(second.engine), "");
  second.Die();
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
