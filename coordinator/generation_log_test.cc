// The log of a request and the table of requests, without gRPC.
#include "coordinator/generation_log.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"
#include "coordinator/fake_serving_backend.h"
#include "coordinator/generation_table.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using google::protobuf::util::MessageDifferencer;
using inference::v1::GenerateEvent;
using ::testing::HasSubstr;
using testing::StatusIs;
using Outcome = GenerationLog::Reader::Outcome;

GenerateEvent Event(int32_t output, uint64_t sequence) {
  GenerateEvent event;
  event.set_request_id("r");
  event.set_output_index(output);
  event.set_sequence(sequence);
  return event;
}

// An answer with everything that events can have: an echo, log-probabilities, text that is not its
// bytes, a delta without a token, several outputs.
std::vector<GenerateEvent> RichAnswer(int32_t outputs, int tokens) {
  std::vector<GenerateEvent> events;
  for (int32_t output = 0; output < outputs; ++output) {
    GenerateEvent accepted = Event(output, 1);
    accepted.mutable_accepted()->set_prompt_tokens(7);
    accepted.mutable_accepted()->set_model("m");
    events.push_back(accepted);
    GenerateEvent echo = Event(output, 2);
    echo.mutable_delta()->set_text("prompt");
    echo.mutable_delta()->set_raw_bytes("prompt");
    events.push_back(echo);
  }
  for (int i = 0; i < tokens; ++i) {
    for (int32_t output = 0; output < outputs; ++output) {
      GenerateEvent event = Event(output, static_cast<uint64_t>(i) + 3);
      inference::v1::Delta* delta = event.mutable_delta();
      delta->set_token_offset(i);
      const bool broken = i % 5 == 3;
      delta->set_raw_bytes(broken ? "\xe2" : absl::StrCat("w", i, " "));
      delta->set_text(broken ? "\xef\xbf\xbd" : absl::StrCat("w", i, " "));
      if (i + 1 < tokens) {
        delta->add_token_ids(100 * output + i);
        inference::v1::TokenLogprobs* logprobs = delta->add_logprobs();
        logprobs->set_token_id(100 * output + i);
        logprobs->set_logprob(-0.5f * static_cast<float>(i));
        logprobs->add_top()->set_token_id(i);
      }
      events.push_back(event);
    }
  }
  for (int32_t output = 0; output < outputs; ++output) {
    GenerateEvent finished = Event(output, static_cast<uint64_t>(tokens) + 3);
    finished.mutable_finished()->set_reason(inference::v1::MAX_TOKENS);
    finished.mutable_finished()->set_determinism_digest(5);
    events.push_back(finished);
  }
  return events;
}

std::shared_ptr<GenerationLog> LogOf(const std::vector<GenerateEvent>& events, int32_t outputs) {
  auto log = std::make_shared<GenerationLog>("r", outputs);
  for (const GenerateEvent& event : events) log->OnEvent(event);
  log->OnDone(absl::OkStatus());
  return log;
}

struct CountingObserver : GenerationObserver {
  void OnNews() override { ++news; }
  std::atomic<int> news{0};
};

TEST(GenerationLogTest, GivesTheEventsAfterAnyOffsetsAsTheyWere) {
  constexpr int kTokens = 9;
  const std::vector<GenerateEvent> events = RichAnswer(2, kTokens);
  const auto log = LogOf(events, 2);
  for (uint64_t first = 0; first <= kTokens + 3; ++first) {
    for (uint64_t second = 0; second <= kTokens + 3; ++second) {
      GenerationLog::Reader reader(log, {first, second}, {});
      std::vector<uint64_t> last = {first, second};
      GenerateEvent event;
      absl::Status end = absl::UnknownError("not set");
      while (reader.Next(&event, &end) == Outcome::kEvent) {
        const auto output = static_cast<size_t>(event.output_index());
        ASSERT_EQ(event.sequence(), last[output] + 1);
        ++last[output];
        const auto same = [&event](const GenerateEvent& one) {
          return one.output_index() == event.output_index() && one.sequence() == event.sequence();
        };
        const auto original = std::find_if(events.begin(), events.end(), same);
        ASSERT_NE(original, events.end());
        EXPECT_TRUE(MessageDifferencer::Equals(*original, event)) << event.ShortDebugString();
      }
      EXPECT_OK(end);
      EXPECT_EQ(last, log->last_sequence());
      EXPECT_EQ(reader.last(), last);
    }
  }
}

TEST(GenerationLogTest, AReaderFarBehindGetsMergedDeltasWithoutGaps) {
  constexpr int kTokens = 3 * GenerationLog::Reader::kMergedTokens;
  const std::vector<GenerateEvent> events = RichAnswer(1, kTokens);
  const auto log = LogOf(events, 1);
  std::string text, raw;
  for (const GenerateEvent& event : events) {
    text += event.delta().text();
    raw += event.delta().raw_bytes();
  }
  GenerationLog::Reader reader(log, {5}, {});
  uint64_t last = 5;
  int messages = 0, ids = 2;  // events 1 and 2 have none; 3, 4 and 5 have 0, 1 and 2
  std::string rest, rest_raw;
  GenerateEvent event;
  absl::Status end;
  while (reader.Next(&event, &end) == Outcome::kEvent) {
    ++messages;
    EXPECT_EQ(event.first_sequence() > 0 ? event.first_sequence() : event.sequence(), last + 1);
    EXPECT_TRUE(event.first_sequence() == 0 || event.first_sequence() < event.sequence());
    last = event.sequence();
    if (event.has_delta()) {
      EXPECT_EQ(event.delta().token_offset(), ids + 1);
      EXPECT_LE(event.delta().token_ids_size(), GenerationLog::Reader::kMergedTokens);
      EXPECT_LE(static_cast<int64_t>(event.delta().raw_bytes().size()),
                GenerationLog::Reader::kMergedBytes + 16);
    }
    ASSERT_EQ(event.delta().token_ids_size(), event.delta().logprobs_size());
    for (int i = 0; i < event.delta().token_ids_size(); ++i) {
      EXPECT_EQ(event.delta().token_ids(i), ++ids);
      EXPECT_EQ(event.delta().logprobs(i).token_id(), ids);
    }
    rest += event.delta().text();
    rest_raw += event.delta().raw_bytes();
  }
  EXPECT_EQ(last, log->last_sequence()[0]);
  EXPECT_EQ(ids, kTokens - 2);  // the last delta has no token
  EXPECT_EQ(rest, text.substr(text.size() - rest.size()));
  EXPECT_EQ(rest_raw, raw.substr(raw.size() - rest_raw.size()));
  EXPECT_TRUE(event.has_finished());
  EXPECT_LT(messages, 300);
}

TEST(GenerationLogTest, TellsAReaderOnceAfterItFoundNothing) {
  auto log = std::make_shared<GenerationLog>("r", 1);
  const auto observer = std::make_shared<CountingObserver>();
  GenerationLog::Reader reader(log, {}, observer);
  GenerateEvent event;
  absl::Status end;
  const std::vector<GenerateEvent> events = RichAnswer(1, 3);
  log->OnEvent(events[0]);
  EXPECT_EQ(observer->news, 0) << "it has not asked yet";
  EXPECT_EQ(reader.Next(&event, &end), Outcome::kEvent);
  EXPECT_EQ(reader.Next(&event, &end), Outcome::kNothing);
  EXPECT_EQ(reader.Next(&event, &end), Outcome::kNothing);
  log->OnEvent(events[1]);
  log->OnEvent(events[2]);
  EXPECT_EQ(observer->news, 1);
  EXPECT_EQ(reader.backlog().events, 2);
  EXPECT_EQ(reader.backlog().bytes, 6 + 3 + 4);
  while (reader.Next(&event, &end) == Outcome::kEvent) {
  }
  const auto last = std::make_shared<CountingObserver>();
  EXPECT_FALSE(log->WaitForEnd(last));
  {
    const auto gone = std::make_shared<CountingObserver>();
    GenerationLog::Reader left(log, {3}, gone);
    EXPECT_EQ(left.Next(&event, &end), Outcome::kNothing);
  }
  log->OnEvent(events[3]);
  EXPECT_EQ(last->news, 0);
  log->OnDone(absl::UnavailableError("gone"));
  EXPECT_EQ(last->news, 1);
  EXPECT_EQ(observer->news, 2);
  EXPECT_EQ(reader.Next(&event, &end), Outcome::kEvent) << "what came before the end is read first";
  EXPECT_EQ(reader.Next(&event, &end), Outcome::kEnd);
  EXPECT_THAT(end, StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_TRUE(log->WaitForEnd(last));
  log->OnEvent(events[4]);
  EXPECT_EQ(log->last_sequence()[0], 4u) << "nothing comes after the end";
}

TEST(GenerationLogTest, IsCompactAndSlowReadersCostNothing) {
  constexpr int kTokens = 100000;
  auto log = std::make_shared<GenerationLog>("r", 1);
  std::vector<std::unique_ptr<GenerationLog::Reader>> readers;
  GenerateEvent event = Event(0, 1);
  event.mutable_accepted();
  log->OnEvent(event);
  for (int i = 0; i < 10; ++i) {
    readers.push_back(std::make_unique<GenerationLog::Reader>(log, std::vector<uint64_t>(),
                                                              std::weak_ptr<GenerationObserver>()));
  }
  for (int i = 0; i < kTokens; ++i) {
    event = Event(0, static_cast<uint64_t>(i) + 2);
    event.mutable_delta()->add_token_ids(i);
    event.mutable_delta()->set_text("word");
    event.mutable_delta()->set_raw_bytes("word");
    log->OnEvent(event);
  }
  log->OnDone(absl::OkStatus());
  EXPECT_LT(log->bytes(), kTokens * 25) << "16 of the event, 4 of the id, 4 of the text";
  const GenerationLog::Usage usage = log->UsageAt({11});
  EXPECT_EQ(usage.completion_tokens, 10);
}

TEST(GenerationLogTest, ReadersFollowAWriterOnOtherThreads) {
  constexpr int kTokens = 20000;
  auto log = std::make_shared<GenerationLog>("r", 2);
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&log, &right]() {
      struct Flag : GenerationObserver {
        void OnNews() override {
          std::lock_guard<std::mutex> lock(mu);
          set = true;
          changed.notify_one();
        }
        std::mutex mu;
        std::condition_variable changed;
        bool set = false;
      };
      const auto flag = std::make_shared<Flag>();
      GenerationLog::Reader reader(log, {}, flag);
      std::vector<uint64_t> last(2, 0);
      GenerateEvent event;
      absl::Status end;
      for (;;) {
        const Outcome outcome = reader.Next(&event, &end);
        if (outcome == Outcome::kEnd) break;
        if (outcome == Outcome::kNothing) {
          std::unique_lock<std::mutex> lock(flag->mu);
          flag->changed.wait(lock, [&flag]() { return flag->set; });
          flag->set = false;
          continue;
        }
        uint64_t& mine = last[static_cast<size_t>(event.output_index())];
        if ((event.first_sequence() > 0 ? event.first_sequence() : event.sequence()) != mine + 1) {
          return;
        }
        mine = event.sequence();
      }
      if (end.ok() && last == log->last_sequence()) ++right;
    });
  }
  for (const GenerateEvent& event : RichAnswer(2, kTokens)) log->OnEvent(event);
  log->OnDone(absl::OkStatus());
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 3);
}

// ---- the table ----

struct NoReader : GenerationReader {
  void OnNews() override {}
  void OnTick(absl::Time /*now*/) override { ++ticks; }
  int ticks = 0;
};

class GenerationTableTest : public ::testing::Test {
 protected:
  GenerationTableTest() {
    GenerationTableOptions options;
    options.attach_grace = absl::Seconds(30);
    options.max_ended = 3;
    options.max_ended_bytes = 1 << 20;
    options.clock = [this]() { return now_; };
    table_ = std::make_unique<GenerationTable>(&backend_, options);
  }

  static GenerationSpec Spec(const std::string& id, uint64_t digest = 1, bool detachable = false) {
    GenerationSpec spec;
    spec.request_id = id;
    spec.body_digest = digest;
    spec.detachable = detachable;
    spec.prompt_ids = {1, 2};
    return spec;
  }
  std::shared_ptr<GenerationLog> Submit(const GenerationSpec& spec) {
    auto joined = table_->Submit(spec, reader_);
    EXPECT_OK(joined);
    EXPECT_FALSE(joined->ending);
    return joined->log;
  }
  std::shared_ptr<FakeServingBackend::Entry> Request(size_t number) {
    return backend_.WaitForRequest(number);
  }
  void Pass(absl::Duration time) {
    now_ += time;
    table_->Tick(now_);
  }
  std::string AttachReason(const std::string& id, std::vector<uint64_t> after = {}) {
    const auto log = table_->Attach(id, after, other_);
    return ReasonOf(log.status());
  }

  absl::Time now_ = absl::FromUnixSeconds(1000);
  FakeServingBackend backend_;
  std::shared_ptr<NoReader> reader_ = std::make_shared<NoReader>();
  std::shared_ptr<NoReader> other_ = std::make_shared<NoReader>();
  std::unique_ptr<GenerationTable> table_;
};

TEST_F(GenerationTableTest, AnIdNamesOneAnswer) {
  const auto log = Submit(Spec("r"));
  EXPECT_EQ(Submit(Spec("r")), log) << "the same body joins";
  EXPECT_EQ(ReasonOf(table_->Submit(Spec("r", 2), reader_).status()), "REQUEST_ID_REUSED");
  Request(1)->sink->OnDone(absl::OkStatus());
  EXPECT_EQ(Submit(Spec("r")), log) << "also after the end";
  EXPECT_EQ(ReasonOf(table_->Submit(Spec("r", 2), reader_).status()), "REQUEST_ID_REUSED");

  const auto failed = Submit(Spec("f"));
  Request(2)->sink->OnDone(absl::UnavailableError("no"));
  EXPECT_NE(Submit(Spec("f", 2)), failed) << "a failed request frees its id";
  EXPECT_NE(Request(3), nullptr);
}

TEST_F(GenerationTableTest, EndedRequestsStayForAWhile) {
  const auto log = Submit(Spec("r"));
  EXPECT_EQ(AttachReason("r", {1}), "SEQUENCE_NOT_REACHED");
  EXPECT_EQ(AttachReason("r", {0, 0}), "LIMIT_EXCEEDED");
  EXPECT_EQ(AttachReason("nobody"), "REQUEST_NOT_FOUND");
  Request(1)->sink->OnDone(absl::OkStatus());
  table_->Leave(*log, reader_.get(), absl::OkStatus());
  Pass(absl::Seconds(0));
  Pass(absl::Seconds(29));
  EXPECT_EQ(AttachReason("r"), "");
  Pass(absl::Seconds(2));
  EXPECT_EQ(AttachReason("r"), "") << "it has a reader";
  table_->Leave(*log, other_.get(), absl::OkStatus());
  table_->Leave(*log, other_.get(), absl::OkStatus());
  Pass(absl::Seconds(0));
  EXPECT_EQ(AttachReason("r"), "EVENT_LOG_TRUNCATED");
  const auto status = table_->Attach("r", {}, other_).status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("--attach-grace")));
  EXPECT_EQ(table_->stats().requests, 0);
}

TEST_F(GenerationTableTest, EndedRequestsAreBoundedInNumberAndBytes) {
  for (int i = 0; i < 5; ++i) {
    const auto log = Submit(Spec(absl::StrCat("r", i)));
    Request(static_cast<size_t>(i) + 1)->sink->OnDone(absl::OkStatus());
    table_->Leave(*log, reader_.get(), absl::OkStatus());
    Pass(absl::Seconds(1));
  }
  EXPECT_EQ(table_->stats().requests, 3);
  EXPECT_EQ(AttachReason("r1"), "EVENT_LOG_TRUNCATED");
  EXPECT_EQ(AttachReason("r2"), "");
  const auto large = Submit(Spec("large"));
  FakeServingBackend::SendAccepted(*Request(6));
  for (int i = 0; i < 60000; ++i) FakeServingBackend::SendToken(*Request(6), i);
  EXPECT_GT(large->bytes(), 1 << 20);
  Pass(absl::Seconds(1));
  EXPECT_EQ(AttachReason("large"), "") << "a running one is never dropped";
  Request(6)->sink->OnDone(absl::OkStatus());
  Pass(absl::Seconds(1));
  EXPECT_EQ(AttachReason("large"), "EVENT_LOG_TRUNCATED");
}

TEST_F(GenerationTableTest, WhoLeavesLastCancelsUnlessItIsDetachable) {
  const absl::Status why = absl::CancelledError("dropped");
  const auto log = Submit(Spec("r"));
  EXPECT_EQ(AttachReason("r"), "");
  table_->Leave(*log, reader_.get(), why);
  EXPECT_OK(backend_.CancelledWith(Request(1))) << "the other one reads on";
  table_->Leave(*log, other_.get(), why);
  EXPECT_EQ(backend_.CancelledWith(Request(1)), why);

  const auto detachable = Submit(Spec("d", 1, true));
  table_->Leave(*detachable, reader_.get(), why);
  Pass(absl::Seconds(29));
  EXPECT_OK(backend_.CancelledWith(Request(2)));
  EXPECT_EQ(AttachReason("d"), "");
  Pass(absl::Seconds(60));
  EXPECT_OK(backend_.CancelledWith(Request(2))) << "it is read";
  EXPECT_EQ(other_->ticks, 1);
  table_->Leave(*detachable, other_.get(), why);
  Pass(absl::Seconds(29));
  EXPECT_OK(backend_.CancelledWith(Request(2)));
  Pass(absl::Seconds(1));
  EXPECT_EQ(ReasonOf(backend_.CancelledWith(Request(2))), "ABANDONED");
  const GenerationTable::Stats stats = table_->stats();
  EXPECT_EQ(stats.abandoned, 1);
  EXPECT_EQ(stats.attaches, 2);
  EXPECT_EQ(stats.joins, 0);
  EXPECT_EQ(stats.readers, 0);
  EXPECT_GT(stats.bytes, 0);
}

TEST_F(GenerationTableTest, WhileACancellationIsUnderWayTheIdIsWaitedFor) {
  backend_.HoldCancels();
  const auto log = Submit(Spec("r"));
  EXPECT_EQ(table_->Cancel("r", absl::CancelledError("stop")), CancelResult::kCancelled);
  auto joined = table_->Submit(Spec("r", 2), reader_);
  ASSERT_OK(joined);
  EXPECT_TRUE(joined->ending);
  EXPECT_EQ(joined->log, log);
  FakeServingBackend::EndCancelled(Request(1));
  EXPECT_EQ(table_->Cancel("r", absl::CancelledError("stop")), CancelResult::kAlreadyFinished);
  joined = table_->Submit(Spec("r", 2), reader_);
  ASSERT_OK(joined);
  EXPECT_FALSE(joined->ending);
  EXPECT_NE(joined->log, log);
  EXPECT_NE(Request(2), nullptr);
}

TEST_F(GenerationTableTest, ARestoredRequestWaitsForAReader) {
  const GenerationSpec spec = Spec("r");
  const auto log = std::make_shared<GenerationLog>("r", 1);
  ASSERT_OK(backend_.Submit(spec, log));
  table_->AddRestored(spec, log);
  Pass(absl::Seconds(29));
  EXPECT_OK(backend_.CancelledWith(Request(1)));
  EXPECT_EQ(Submit(spec), log) << "the client sends it again";
  table_->Leave(*log, reader_.get(), absl::CancelledError("dropped"));
  EXPECT_FALSE(backend_.CancelledWith(Request(1)).ok()) << "it is not detachable";

  const auto alone = std::make_shared<GenerationLog>("alone", 1);
  ASSERT_OK(backend_.Submit(Spec("alone"), alone));
  table_->AddRestored(Spec("alone"), alone);
  Pass(absl::Seconds(30));
  EXPECT_EQ(ReasonOf(backend_.CancelledWith(Request(2))), "ABANDONED");
}

}  // namespace
}  // namespace lockstep
