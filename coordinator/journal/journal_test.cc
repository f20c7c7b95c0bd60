// The journal on a disk in memory that fails when told to, and its lock on a real one.
#include "coordinator/journal/journal.h"

#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/errors.h"
#include "coordinator/generation_log.h"
#include "coordinator/journal/convert.h"
#include "coordinator/journal/fake_storage.h"
#include "coordinator/journal/record.h"
#include "coordinator/journal/storage.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "proto/journal.pb.h"

namespace lockstep {
namespace {

using google::protobuf::util::MessageDifferencer;
using inference::v1::GenerateEvent;
using journal::v1::Record;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::StatusIs;

constexpr uint64_t kModel = 77;

bool Eventually(const std::function<bool()>& condition) {
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (!condition()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

GenerationSpec Spec(const std::string& id, int32_t n = 1) {
  GenerationSpec spec;
  spec.request_id = id;
  spec.body_digest = 5;
  spec.prompt_ids = {3, 1, 2};
  spec.n = n;
  spec.max_tokens = 1000;
  return spec;
}

// A request that is answered by hand, as an engine does it.
struct Answer {
  Answer(Journal* journal, const GenerationSpec& request)
      : spec(request),
        log(std::make_shared<GenerationLog>(request.request_id, request.n)),
        sink(journal->Wrap(request, log)),
        sequence(static_cast<size_t>(request.n), 0) {}

  GenerateEvent Event(int32_t output) {
    GenerateEvent event;
    event.set_request_id(spec.request_id);
    event.set_output_index(output);
    event.set_sequence(++sequence[static_cast<size_t>(output)]);
    return event;
  }
  void Accept() {
    for (int32_t output = 0; output < spec.n; ++output) {
      GenerateEvent event = Event(output);
      event.mutable_accepted()->set_model("m");
      event.mutable_accepted()->set_epoch(3);
      event.mutable_accepted()->mutable_effective_sampling()->set_seed(11);
      sink->OnEvent(event);
    }
  }
  void Token(int32_t id, int32_t output = 0) {
    worker::v1::SequenceResult result;
    result.set_sampled_id(id);
    worker::v1::Logprob* logprob = result.add_logprobs();
    logprob->set_id(id);
    logprob->set_logprob(-1.5f);
    sink->OnToken(output, static_cast<uint64_t>(id) * 1000, result);
    GenerateEvent event = Event(output);
    event.mutable_delta()->add_token_ids(id);
    sink->OnEvent(event);
  }
  void Finish(int32_t output = 0) {
    GenerateEvent event = Event(output);
    event.mutable_finished()->set_determinism_digest(9);
    sink->OnEvent(event);
  }
  bool WaitShown() {
    return Eventually([this]() { return log->last_sequence() == sequence; });
  }
  bool WaitEnd() {
    return Eventually([this]() { return log->end().has_value(); });
  }

  GenerationSpec spec;
  std::shared_ptr<GenerationLog> log;
  std::shared_ptr<GenerationSink> sink;
  std::vector<uint64_t> sequence;
};

class JournalTest : public ::testing::Test {
 protected:
  static JournalOptions Options() {
    JournalOptions options;
    options.sync = JournalSync::kOff;
    options.hold = absl::Minutes(5);
    options.retry_period = absl::Milliseconds(1);
    return options;
  }
  // Opened on disk_ and begun.
  void Open(const JournalOptions& options = Options()) {
    auto opened = Journal::Open(options, disk_.Mount());
    ASSERT_OK(opened);
    journal_ = *std::move(opened);
    auto restored =
        journal_->Begin(kModel, [this](const std::string& id, const absl::Status& status) {
          EXPECT_EQ(ReasonOf(status), "JOURNAL_UNWRITABLE");
          std::lock_guard<std::mutex> lock(mu_);
          lost_.push_back(id);
        });
    ASSERT_OK(restored);
    restored_ = *std::move(restored);
  }
  // As if the process had died: what was written is there, nothing is ended.
  void Reopen(const JournalOptions& options = Options()) {
    restored_.clear();
    const auto files = disk_.files();
    journal_.reset();
    disk_.SetFiles(files);
    Open(options);
  }
  // The only segment on the disk.
  std::string Segment() {
    std::string found;
    for (const auto& [name, bytes] : disk_.files()) {
      if (name.find(".journal") == std::string::npos) continue;
      EXPECT_TRUE(found.empty()) << "two segments";
      found = bytes;
    }
    return found;
  }
  std::vector<std::string> lost() {
    std::lock_guard<std::mutex> lock(mu_);
    return lost_;
  }

  FakeDisk disk_;
  std::unique_ptr<Journal> journal_;
  std::vector<Journal::Restored> restored_;
  std::mutex mu_;
  std::vector<std::string> lost_;
};

TEST_F(JournalTest, GivesBackEverythingThatWasWritten) {
  GenerationSpec spec = Spec("r", 2);
  spec.prompt_text = std::string("a\0\xff", 3);
  spec.sampling.set_seed(11);
  spec.sampling.set_temperature(0.5f);
  spec.sampling.add_bias_ids(4);
  spec.effective_sampling.set_seed(11);
  spec.min_tokens = 2;
  spec.max_tokens_is_context = true;
  spec.stop_strings = {"stop", std::string("\xfe", 1)};
  spec.stop_token_ids = {8};
  spec.eos_token_ids = {9, 10};
  spec.include_stop_in_output = true;
  spec.detokenize = false;
  spec.return_token_ids = false;
  spec.echo = true;
  spec.detachable = true;
  spec.priority = -4;
  spec.cache_salt = "salt";
  spec.cache_bypass = true;
  spec.queue_deadline = absl::FromUnixMicros(5000000);
  spec.deadline = absl::FromUnixMicros(6000000);
  Open();
  Answer answer(journal_.get(), spec);
  answer.Accept();
  Answer waiting(journal_.get(), spec);
  waiting.spec.request_id = "w";
  ASSERT_TRUE(answer.WaitShown());
  Reopen();
  ASSERT_EQ(restored_.size(), 1u);
  const auto same = [&spec](const RestoredRequest& request) {
    const auto record = [&request](const GenerationSpec& s) {
      return ToAccept(1, s, request.accepted, request.submitted).SerializeAsString();
    };
    return record(spec) == record(request.spec) &&
           request.spec.effective_sampling.SerializeAsString() ==
               spec.effective_sampling.SerializeAsString();
  };
  EXPECT_TRUE(same(restored_[0].request));
  EXPECT_EQ(restored_[0].request.accepted.epoch(), 3u);
  EXPECT_LT(absl::AbsDuration(absl::Now() - restored_[0].request.submitted), absl::Minutes(1));
  EXPECT_EQ(restored_[0].request.spec.queue_deadline, spec.queue_deadline);

  // It goes on, in another process.
  auto log = std::make_shared<GenerationLog>("r", 2);
  Answer again(journal_.get(), spec);
  again.Accept();  // an id that is used again takes the place of the first
  again.Token(20);
  again.Token(21, 1);
  again.Token(22);
  again.Finish();
  ASSERT_TRUE(again.WaitShown());
  Reopen();
  ASSERT_EQ(restored_.size(), 1u);
  const RestoredRequest& request = restored_[0].request;
  EXPECT_TRUE(same(request));
  ASSERT_EQ(request.outputs.size(), 2u);
  EXPECT_EQ(request.outputs[0].ids, (std::vector<int32_t>{20, 22}));
  EXPECT_EQ(request.outputs[0].digests, (std::vector<uint64_t>{20000, 22000}));
  ASSERT_EQ(request.outputs[0].logprobs.size(), 2u);
  EXPECT_EQ(request.outputs[0].logprobs[1][0].id(), 22);
  ASSERT_TRUE(request.outputs[0].finished.has_value());
  EXPECT_EQ(request.outputs[0].finished->determinism_digest(), 9u);
  EXPECT_EQ(request.outputs[1].ids, std::vector<int32_t>{21});
  EXPECT_FALSE(request.outputs[1].finished.has_value());
  EXPECT_FALSE(request.end.has_value());
  EXPECT_NE(restored_[0].sink, nullptr);
}

TEST_F(JournalTest, ARestoredRequestGoesOnAndEnds) {
  Open();
  Answer answer(journal_.get(), Spec("r"));
  answer.Accept();
  answer.Token(20);
  ASSERT_TRUE(answer.WaitShown());
  for (int32_t id = 21; id < 24; ++id) {
    Reopen();
    ASSERT_EQ(restored_.size(), 1u);
    ASSERT_EQ(restored_[0].request.outputs[0].ids.size(), static_cast<size_t>(id - 20));
    answer.log = std::make_shared<GenerationLog>("r", 1);
    answer.sink = Journal::WrapRestored(restored_[0], answer.log);
    answer.sequence[0] = 0;
    GenerateEvent event = answer.Event(0);
    event.mutable_accepted();
    answer.log->OnEvent(event);  // shown before
    answer.Token(id);
    ASSERT_TRUE(answer.WaitShown());
  }
  ErrorDetail detail;
  detail.reason = "NUMERIC_NAN";
  answer.sink->OnDone(MakeError(absl::StatusCode::kInternal, "NaN", detail));
  ASSERT_TRUE(answer.WaitEnd());
  Reopen();
  ASSERT_EQ(restored_.size(), 1u) << "an ended one stays for keep_ended";
  EXPECT_EQ(restored_[0].sink, nullptr);
  EXPECT_THAT(*restored_[0].request.end, StatusIs(absl::StatusCode::kInternal, "NaN"));
  EXPECT_EQ(ReasonOf(*restored_[0].request.end), "NUMERIC_NAN");
  EXPECT_EQ(restored_[0].request.outputs[0].ids, (std::vector<int32_t>{20, 21, 22, 23}));
}

TEST_F(JournalTest, TheEndOfTheServerIsNotTheEndOfARequest) {
  for (const absl::Status& status :
       {absl::UnavailableError("the server is stopping"), absl::AbortedError("no recovery left")}) {
    disk_.SetFiles({});
    Open();
    Answer answer(journal_.get(), Spec("r"));
    answer.Accept();
    answer.Token(1);
    answer.sink->OnDone(status);
    ASSERT_TRUE(answer.WaitEnd());
    EXPECT_EQ(*answer.log->end(), status);
    Reopen();
    ASSERT_EQ(restored_.size(), 1u);
    EXPECT_FALSE(restored_[0].request.end.has_value());
    EXPECT_EQ(restored_[0].request.outputs[0].ids.size(), 1u);
  }
}

TEST_F(JournalTest, EndedRequestsAreForgottenAfterAWhile) {
  JournalOptions options = Options();
  options.keep_ended = absl::Milliseconds(1);
  Open(options);
  for (const char* id : {"old", "new"}) {
    Answer answer(journal_.get(), Spec(id));
    answer.Accept();
    answer.sink->OnDone(absl::OkStatus());
    ASSERT_TRUE(answer.WaitEnd());
    absl::SleepFor(absl::Milliseconds(20));  // the subject: more than keep_ended
  }
  Reopen(options);
  ASSERT_EQ(restored_.size(), 1u) << "as old as the journal's last end";
  EXPECT_EQ(restored_[0].request.spec.request_id, "new");
}

// ---- broken files ----

// A segment of a header and three records; the sizes of their frames.
std::string ThreeRecords(std::vector<int64_t>* frames) {
  std::string bytes = kSegmentMagic;
  Record record;
  record.mutable_header()->set_model_digest(kModel);
  frames->push_back(AppendFrame(record, &bytes));
  *record.mutable_accept() =
      ToAccept(1, Spec("r"), inference::v1::Accepted(), absl::FromUnixSeconds(1));
  frames->push_back(AppendFrame(record, &bytes));
  for (int32_t id : {20, 21}) {
    record.mutable_tokens()->add_tokens()->set_ordinal(1);
    record.mutable_tokens()->mutable_tokens(0)->set_id(id);
    frames->push_back(AppendFrame(record, &bytes));
    record.Clear();
  }
  return bytes;
}

TEST_F(JournalTest, ATornTailIsDroppedAtEveryByte) {
  std::vector<int64_t> frames;
  const std::string bytes = ThreeRecords(&frames);
  const size_t whole = bytes.size() - static_cast<size_t>(frames.back());
  for (size_t size = whole; size <= bytes.size(); ++size) {
    for (const size_t zeros : {0, 1, 100}) {  // blocks that the file system had reserved
      if (size == bytes.size() && zeros == 0) continue;
      disk_.SetFiles({{"7.journal", bytes.substr(0, size) + std::string(zeros, '\0')}});
      Open();
      ASSERT_EQ(restored_.size(), 1u);
      const size_t tokens = size == bytes.size() ? 2 : 1;
      EXPECT_EQ(restored_[0].request.outputs[0].ids.size(), tokens) << size;
      // What is written next does not suffer.
      auto log = std::make_shared<GenerationLog>("r", 1);
      const auto sink = Journal::WrapRestored(restored_[0], log);
      worker::v1::SequenceResult result;
      result.set_sampled_id(30);
      sink->OnToken(0, 1, result);
      sink->OnDone(absl::UnavailableError("stop"));
      ASSERT_TRUE(Eventually([&log]() { return log->end().has_value(); }));
      Reopen();
      ASSERT_EQ(restored_.size(), 1u);
      EXPECT_EQ(restored_[0].request.outputs[0].ids.size(), tokens + 1);
      EXPECT_EQ(restored_[0].request.outputs[0].ids.back(), 30);
    }
  }
}

TEST_F(JournalTest, AFlippedBitIsFoundWhereverItIs) {
  std::vector<int64_t> frames;
  const std::string bytes = ThreeRecords(&frames);
  const size_t last = bytes.size() - static_cast<size_t>(frames.back());
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (const int bit : {0, 7}) {
      std::string flipped = bytes;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << bit));
      disk_.SetFiles({{"7.journal", flipped}});
      const auto opened = Journal::Open(Options(), disk_.Mount());
      if (at >= last) {
        // No different from an unfinished write.
        ASSERT_OK(opened) << at;
        const auto restored = (*opened)->Begin(kModel, nullptr);
        ASSERT_OK(restored);
        EXPECT_EQ((*restored)[0].request.outputs[0].ids, std::vector<int32_t>{20});
        continue;
      }
      size_t frame = 0, begin = kSegmentMagicBytes;
      while (at >= begin + static_cast<size_t>(frames[frame])) {
        begin += static_cast<size_t>(frames[frame++]);
      }
      const std::string offset =
          absl::StrCat("broken at byte ", at < kSegmentMagicBytes ? 0 : begin, ":");
      EXPECT_THAT(opened, StatusIs(absl::StatusCode::kDataLoss,
                                   AllOf(HasSubstr("fake/7.journal"), HasSubstr(offset))))
          << at;
    }
  }
}

TEST_F(JournalTest, RecordsThatMakeNoSenseAreRefused) {
  std::vector<int64_t> frames;
  const std::string bytes = ThreeRecords(&frames);
  Record stray, twice, unknown, late;
  stray.mutable_tokens()->add_tokens()->set_ordinal(9);
  *twice.mutable_accept() =
      ToAccept(1, Spec("other"), inference::v1::Accepted(), absl::FromUnixSeconds(1));
  late.mutable_output_end()->set_ordinal(1);
  late.mutable_output_end()->set_output(1);
  Record many = twice, last = twice;
  many.mutable_accept()->set_ordinal(2);
  many.mutable_accept()->set_n(2147483647);
  last.mutable_accept()->set_ordinal(~uint64_t{0});
  for (const Record& record : {stray, twice, unknown, late, many, last}) {
    std::string broken = bytes;
    AppendFrame(record, &broken);
    disk_.SetFiles({{"7.journal", broken}});
    EXPECT_THAT(Journal::Open(Options(), disk_.Mount()),
                StatusIs(absl::StatusCode::kDataLoss,
                         HasSubstr(absl::StrCat("broken at byte ", bytes.size(), ":"))));
  }
}

TEST_F(JournalTest, RequestsOfAnotherModelAreNotServed) {
  std::vector<int64_t> frames;
  disk_.SetFiles({{"7.journal", ThreeRecords(&frames)}});
  auto opened = Journal::Open(Options(), disk_.Mount());
  ASSERT_OK(opened);
  EXPECT_THAT((*opened)->Begin(kModel + 1, nullptr),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("serve that model")));
  EXPECT_EQ(disk_.files().count("7.journal"), 1u) << "nothing is lost";
}

// ---- disks that fail ----

TEST_F(JournalTest, AFullDiskHoldsEventsUntilThereIsRoomAtAnyByte) {
  for (int64_t room = 0; room < 150; ++room) {
    disk_.SetFiles({});
    disk_.SetCapacity(1 << 20);
    Open();
    Answer answer(journal_.get(), Spec("r"));
    answer.Accept();
    ASSERT_TRUE(answer.WaitShown());
    disk_.SetCapacity(disk_.size() + room);
    for (int32_t id = 0; id < 10; ++id) answer.Token(id);
    ASSERT_TRUE(Eventually([this]() { return !journal_->Writable().ok(); }));
    EXPECT_EQ(ReasonOf(journal_->Writable()), "JOURNAL_UNWRITABLE");
    EXPECT_THAT(journal_->Writable(),
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr("No space left")));
    const uint64_t shown = answer.log->last_sequence()[0];
    EXPECT_LT(shown, 11u);
    disk_.SetCapacity(1 << 20);
    ASSERT_TRUE(answer.WaitShown());
    EXPECT_OK(journal_->Writable());
    Reopen();
    ASSERT_EQ(restored_.size(), 1u);
    EXPECT_EQ(restored_[0].request.outputs[0].ids.size(), 10u);
  }
  EXPECT_TRUE(lost().empty());
}

TEST_F(JournalTest, WhatIsShownIsWritten) {
  Open();
  Answer answer(journal_.get(), Spec("r"));
  answer.Accept();
  for (int32_t id = 0; id < 500; ++id) {
    answer.Token(id);
    const uint64_t shown = answer.log->last_sequence()[0];
    std::vector<int32_t> written;
    const std::string bytes = Segment();
    const auto torn = ScanSegment(bytes, "", [&written](const Record& record, int64_t) {
      for (const auto& token : record.tokens().tokens()) written.push_back(token.id());
      return absl::OkStatus();
    });
    ASSERT_OK(torn);
    ASSERT_GE(written.size() + 1, shown);
  }
}

TEST_F(JournalTest, AfterTheHoldRequestsEndAndItRecovers) {
  JournalOptions options = Options();
  options.hold = absl::Milliseconds(50);
  Open(options);
  Answer written(journal_.get(), Spec("written"));
  written.Accept();
  written.Token(1);
  ASSERT_TRUE(written.WaitShown());
  disk_.SetCapacity(disk_.size());
  Answer fresh(journal_.get(), Spec("fresh"));
  fresh.Accept();
  written.Token(2);
  written.Finish();
  written.sink->OnDone(absl::OkStatus());
  ASSERT_TRUE(written.WaitEnd());
  ASSERT_TRUE(fresh.WaitEnd());
  for (const Answer* answer : {&written, &fresh}) {
    EXPECT_THAT(*answer->log->end(), StatusIs(absl::StatusCode::kUnavailable));
    EXPECT_EQ(ReasonOf(*answer->log->end()), "JOURNAL_UNWRITABLE");
  }
  EXPECT_EQ(written.log->last_sequence()[0], 2u) << "what could not be written was not shown";
  EXPECT_EQ(fresh.log->last_sequence()[0], 0u);
  ASSERT_TRUE(Eventually([this]() { return lost().size() == 2; }));
  fresh.Token(3);  // the engine has not heard of it yet
  fresh.sink->OnDone(absl::CancelledError("lost"));
  EXPECT_FALSE(journal_->Writable().ok());

  disk_.SetCapacity(1 << 20);
  ASSERT_TRUE(Eventually([this]() { return journal_->Writable().ok(); }));
  Answer next(journal_.get(), Spec("next"));
  next.Accept();
  ASSERT_TRUE(next.WaitShown());
  Reopen();
  ASSERT_EQ(restored_.size(), 2u);
  EXPECT_EQ(restored_[0].request.spec.request_id, "written");
  ASSERT_TRUE(restored_[0].request.end.has_value());
  EXPECT_EQ(ReasonOf(*restored_[0].request.end), "JOURNAL_UNWRITABLE");
  EXPECT_EQ(restored_[1].request.spec.request_id, "next");
  EXPECT_FALSE(restored_[1].request.end.has_value());
}

TEST_F(JournalTest, StopWithAFullDiskEndsRequestsAtOnce) {
  Open();  // would hold them for minutes
  Answer answer(journal_.get(), Spec("r"));
  answer.Accept();
  ASSERT_TRUE(answer.WaitShown());
  disk_.SetCapacity(disk_.size());
  answer.Token(1);
  journal_->Stop();
  ASSERT_TRUE(answer.log->end().has_value());
  EXPECT_EQ(ReasonOf(*answer.log->end()), "JOURNAL_UNWRITABLE");
  disk_.SetCapacity(1 << 20);
  Reopen();
  ASSERT_EQ(restored_.size(), 1u);
  EXPECT_FALSE(restored_[0].request.end.has_value()) << "the next process goes on with it";
}

TEST_F(JournalTest, ADiskWithoutRoomIsToldWhenItBegins) {
  disk_.SetCapacity(10);
  auto opened = Journal::Open(Options(), disk_.Mount());
  ASSERT_OK(opened);
  EXPECT_THAT((*opened)->Begin(kModel, nullptr),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("No space left")));
}

TEST_F(JournalTest, SyncPolicies) {
  for (const JournalSync sync : {JournalSync::kStep, JournalSync::k50ms, JournalSync::kOff}) {
    disk_.SetFiles({});
    JournalOptions options = Options();
    options.sync = sync;
    Open(options);
    const int before = disk_.syncs();
    Answer answer(journal_.get(), Spec("r"));
    answer.Accept();
    ASSERT_TRUE(answer.WaitShown());
    for (int32_t id = 0; id < 5; ++id) {
      answer.Token(id);
      ASSERT_TRUE(answer.WaitShown());
    }
    if (sync == JournalSync::kStep) {
      EXPECT_GE(disk_.syncs(), before + 6) << "each was durable before it was shown";
    } else if (sync == JournalSync::k50ms) {
      EXPECT_TRUE(Eventually([&]() { return disk_.syncs() > before; }));
    }
    journal_.reset();
    EXPECT_EQ(disk_.syncs() == before, sync == JournalSync::kOff);
  }
}

// After a failed sync a file cannot be trusted, whatever later syncs say.
TEST_F(JournalTest, AFailedSyncLeadsToANewSegment) {
  for (const JournalSync sync : {JournalSync::kStep, JournalSync::k50ms}) {
    disk_.SetFiles({});
    JournalOptions options = Options();
    options.sync = sync;
    Open(options);
    Answer answer(journal_.get(), Spec("r"));
    answer.Accept();
    ASSERT_TRUE(answer.WaitShown());
    const int64_t rewrites = journal_->stats().rewrites;
    disk_.FailSyncs(true);
    answer.Token(1);
    ASSERT_TRUE(Eventually([this]() { return !journal_->Writable().ok(); }));
    disk_.FailSyncs(false);
    ASSERT_TRUE(Eventually([this]() { return journal_->Writable().ok(); }));
    ASSERT_TRUE(answer.WaitShown());
    EXPECT_GT(journal_->stats().rewrites, rewrites);
    answer.Token(2);
    ASSERT_TRUE(answer.WaitShown());
    Reopen();
    ASSERT_EQ(restored_.size(), 1u);
    EXPECT_EQ(restored_[0].request.outputs[0].ids, (std::vector<int32_t>{1, 2}));
  }
}

// ---- size ----

TEST_F(JournalTest, NeverGrowsWithoutLimit) {
  JournalOptions options = Options();
  options.keep_ended = absl::ZeroDuration();
  options.max_dead_bytes = 20000;
  Open(options);
  Answer living(journal_.get(), Spec("living"));
  living.Accept();
  int64_t largest = 0;
  for (int i = 0; i < 500; ++i) {
    Answer answer(journal_.get(), Spec(absl::StrCat("r", i)));
    answer.Accept();
    for (int32_t id = 0; id < 20; ++id) answer.Token(id);
    if (i % 10 == 0) living.Token(i);
    answer.Finish();
    answer.sink->OnDone(absl::OkStatus());
    ASSERT_TRUE(answer.WaitEnd());
    largest = std::max(largest, disk_.size());
  }
  ASSERT_TRUE(living.WaitShown());
  EXPECT_LT(largest, 60000) << "the bound, what lives, and both segments during a rewrite";
  EXPECT_GT(journal_->stats().rewrites, 5);
  Reopen(options);
  bool found = false;
  for (const Journal::Restored& restored : restored_) {
    if (restored.request.spec.request_id != "living") continue;
    found = true;
    EXPECT_EQ(restored.request.outputs[0].ids.size(), 50u);
  }
  EXPECT_TRUE(found);
}

TEST_F(JournalTest, ARewriteThatFailsIsDoneLater) {
  JournalOptions options = Options();
  options.keep_ended = absl::ZeroDuration();
  options.max_dead_bytes = 1000;
  Open(options);
  Answer living(journal_.get(), Spec("living"));
  living.Accept();
  for (int32_t id = 0; id < 100; ++id) living.Token(id);
  ASSERT_TRUE(living.WaitShown());
  const auto finish_one = [this](int i) {
    Answer answer(journal_.get(), Spec(absl::StrCat("r", i)));
    answer.Accept();
    for (int32_t id = 0; id < 50; ++id) answer.Token(id);
    answer.sink->OnDone(absl::OkStatus());
    return answer.WaitEnd();
  };
  disk_.FailRenames(true);
  int i = 0;
  while (journal_->stats().failed_rewrites == 0) ASSERT_TRUE(finish_one(i++));
  EXPECT_EQ(disk_.files().size(), 1u) << "what it began is removed";
  EXPECT_OK(journal_->Writable());
  disk_.FailRenames(false);
  const int64_t rewrites = journal_->stats().rewrites;
  while (journal_->stats().rewrites == rewrites) ASSERT_TRUE(finish_one(i++));
  Reopen(options);
  ASSERT_GE(restored_.size(), 1u);
  EXPECT_EQ(restored_[0].request.outputs[0].ids.size(), 100u);
}

// ---- the directory ----

TEST(JournalDirectoryTest, IsLockedForOneProcess) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/journal.", getpid());
  JournalOptions options;
  options.directory = path;
  {
    auto first = Journal::Open(options);
    ASSERT_OK(first);
    EXPECT_THAT(Journal::Open(options),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         AllOf(HasSubstr(absl::StrCat("process ", getpid())), HasSubstr(path))));
    ASSERT_OK((*first)->Begin(kModel, nullptr));
    Answer answer(first->get(), Spec("r"));
    answer.Accept();
    answer.Token(1);
    ASSERT_TRUE(answer.WaitShown());
  }
  auto second = Journal::Open(options);
  ASSERT_OK(second);
  const auto restored = (*second)->Begin(kModel, nullptr);
  ASSERT_OK(restored);
  ASSERT_EQ(restored->size(), 1u);
  EXPECT_EQ((*restored)[0].request.outputs[0].ids, std::vector<int32_t>{1});
}

TEST(JournalDirectoryTest, APathThatCannotBeHadIsNamed) {
  JournalOptions options;
  options.directory = "/proc/nowhere/journal";
  EXPECT_THAT(Journal::Open(options).status().message(), HasSubstr("/proc/nowhere/journal"));
  const std::string file = absl::StrCat(::testing::TempDir(), "/file.", getpid());
  fclose(fopen(file.c_str(), "w"));
  options.directory = file;
  EXPECT_THAT(Journal::Open(options).status().message(), HasSubstr(file));
}

}  // namespace
}  // namespace lockstep
