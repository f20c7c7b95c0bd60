// Coordinators that end while streams run, and start again on the same journal, as real processes:
// clients attach and get exactly what they miss.
#include <signal.h>
#include <sys/resource.h>

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "proto/inference.grpc.pb.h"
#include "tests/cluster.h"

namespace lockstep {
namespace testing {
namespace {

using inference::v1::AttachGenerationRequest;
using inference::v1::Finished;
using inference::v1::GenerateEvent;
using inference::v1::GenerateRequest;
using inference::v1::GenerateResult;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kModel[] = "qwen3_5-trained-ct-nvfp4-fp8";

// A client that keeps what it got, and reads on where it was.
class Client {
 public:
  explicit Client(GenerateRequest request)
      : request_(std::move(request)),
        outputs_(static_cast<size_t>(std::max(1, request_.sampling().n()))) {}

  struct Output {
    uint64_t last = 0;
    std::vector<int32_t> ids;
    std::string text;
    Finished finished;
  };

  grpc::Status Generate(inference::v1::InferenceService::Stub* stub) {
    grpc::ClientContext context;
    return Read(stub->Generate(&context, request_).get());
  }
  grpc::Status Attach(inference::v1::InferenceService::Stub* stub) {
    AttachGenerationRequest attach;
    attach.set_request_id(request_.request_id());
    for (const Output& output : outputs_) attach.add_after_sequence(output.last);
    grpc::ClientContext context;
    return Read(stub->AttachGeneration(&context, attach).get());
  }
  void WaitForTokens(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [this, count]() {
      mutex_.AssertHeld();
      for (const Output& output : outputs_) {
        if (output.ids.size() < count && !output.finished.has_usage()) return false;
      }
      return true;
    };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&enough), absl::Seconds(60)));
  }
  // Gap-free, and what another run of the same request gives.
  void ExpectEquals(const GenerateResult& undisturbed) {
    ASSERT_EQ(outputs_.size(), static_cast<size_t>(undisturbed.outputs_size()));
    EXPECT_EQ(breach_, "") << request_.request_id();
    for (int i = 0; i < undisturbed.outputs_size(); ++i) {
      const Output& mine = outputs_[static_cast<size_t>(i)];
      const auto& other = undisturbed.outputs(i);
      EXPECT_EQ(mine.text, other.text()) << request_.request_id();
      EXPECT_EQ(mine.ids, std::vector<int32_t>(other.token_ids().begin(), other.token_ids().end()));
      EXPECT_EQ(mine.finished.determinism_digest(), other.finished().determinism_digest());
      EXPECT_EQ(mine.finished.reason(), other.finished().reason());
    }
  }
  const GenerateRequest& request() const { return request_; }

 private:
  grpc::Status Read(grpc::ClientReader<GenerateEvent>* stream) {
    GenerateEvent event;
    while (stream->Read(&event)) {
      absl::MutexLock lock(&mutex_);
      Output& output = outputs_[static_cast<size_t>(event.output_index())];
      const uint64_t first = event.first_sequence() > 0 ? event.first_sequence() : event.sequence();
      if (first != output.last + 1 && breach_.empty()) {
        breach_ = absl::StrCat("event ", first, " after ", output.last);
      }
      if (event.has_delta() && event.delta().token_ids_size() > 0 &&
          event.delta().token_offset() != static_cast<int64_t>(output.ids.size())) {
        breach_ = absl::StrCat("token ", event.delta().token_offset(), " twice or too early");
      }
      output.last = event.sequence();
      output.text += event.delta().text();
      for (const int32_t id : event.delta().token_ids()) output.ids.push_back(id);
      if (event.has_finished()) output.finished = event.finished();
    }
    return stream->Finish();
  }

  const GenerateRequest request_;
  absl::Mutex mutex_;
  std::vector<Output> outputs_;
  std::string breach_;
};

GenerateRequest Request(const std::string& id, int max_tokens) {
  GenerateRequest request;
  request.set_request_id(id);
  request.set_text(absl::StrCat("The capital of France is Paris. Number ", id, " of"));
  request.mutable_sampling()->set_max_tokens(max_tokens);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_ignore_eos(true);
  return request;
}

// Seeded, with penalties and min_tokens: what a restart must not begin anew.
GenerateRequest Sampled(const std::string& id, int max_tokens, int outputs) {
  GenerateRequest request = Request(id, max_tokens);
  auto* sampling = request.mutable_sampling();
  sampling->set_temperature(1);
  sampling->set_seed(17);
  sampling->set_n(outputs);
  sampling->set_min_tokens(max_tokens - 4);
  sampling->set_presence_penalty(0.5f);
  sampling->set_frequency_penalty(0.5f);
  sampling->set_repetition_penalty(1.2f);
  request.mutable_stopping()->set_ignore_eos(false);
  return request;
}

class CoordinatorRestartTest : public ::testing::Test {
 protected:
  CoordinatorRestartTest() {
    options_.model = TestModel(kModel);
    options_.tp = 2;
    options_.delay_results_ms = 20;  // so that streams are still running when it ends
    options_.coordinator_flags = {"--request-journal", TempPath("journal"), "--shutdown-timeout",
                                  "0"};
  }

  // Starts the streams, waits until each has some tokens, ends the coordinator with `signal`, and
  // starts another on the workers that are still there.
  void RunAndRestart(int signal) {
    ASSERT_OK_AND_ASSIGN(first_, Cluster::Start(options_));
    for (const GenerateRequest& request : {Request("greedy", 60), Sampled("sampled", 60, 1),
                                           Sampled("several", 40, 3), Request("ended", 4)}) {
      clients_.push_back(std::make_unique<Client>(request));
    }
    std::vector<grpc::Status> ends(clients_.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < clients_.size(); ++i) {
      threads.emplace_back(
          [this, i, &ends]() { ends[i] = clients_[i]->Generate(first_->inference()); });
    }
    for (const auto& client : clients_) client->WaitForTokens(6);
    first_->coordinator().Signal(signal);
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(first_->coordinator().Wait(absl::Seconds(30)));
    for (size_t i = 0; i < clients_.size(); ++i) {
      const bool ended = clients_[i]->request().request_id() == "ended";
      EXPECT_EQ(ends[i].error_code(), ended ? grpc::StatusCode::OK : grpc::StatusCode::UNAVAILABLE)
          << ends[i].error_message();
    }
    ASSERT_OK_AND_ASSIGN(second_, Cluster::StartCoordinator(options_, first_->workers().addresses));
    ASSERT_OK(second_->WaitReady(absl::Seconds(120)));
  }
  void ExpectUndisturbed() {
    for (const auto& client : clients_) {
      GenerateRequest again = client->request();
      again.set_request_id(absl::StrCat(again.request_id(), "-again"));
      const auto undisturbed = second_->Generate(again);
      ASSERT_OK(undisturbed);
      client->ExpectEquals(*undisturbed);
    }
  }

  ClusterOptions options_;
  std::unique_ptr<Cluster> first_, second_;  // the first has the workers
  std::vector<std::unique_ptr<Client>> clients_;
};

TEST_F(CoordinatorRestartTest, KilledWhileStreamsRunAndClientsMissNothing) {
  RunAndRestart(SIGKILL);
  if (HasFatalFailure()) return;
  // Sent again instead of attached to: it joins the same answer from its beginning.
  Client resender(clients_[0]->request());
  std::thread resending([this, &resender]() {
    const grpc::Status status = resender.Generate(second_->inference());
    EXPECT_TRUE(status.ok()) << status.error_message();
  });
  std::vector<std::thread> threads;
  for (const auto& client : clients_) {
    threads.emplace_back([this, &client]() {
      const grpc::Status status = client->Attach(second_->inference());
      EXPECT_TRUE(status.ok()) << client->request().request_id() << ": " << status.error_message();
    });
  }
  for (std::thread& thread : threads) thread.join();
  resending.join();
  EXPECT_THAT(second_->coordinator_log(), HasSubstr("journal: 3 requests with"));
  EXPECT_THAT(second_->coordinator_log(), HasSubstr("1 that have ended can be read"));
  // Nothing was sampled twice: a restored token is replayed, not generated.
  ExpectUndisturbed();
  const GenerateRequest again = clients_[0]->request();
  const auto whole = second_->Generate(again);
  ASSERT_OK(whole);
  resender.ExpectEquals(*whole);
  second_->ExpectIdle();
  EXPECT_EQ(second_->Status().counters().at("digest_mismatches"), 0);
}

TEST_F(CoordinatorRestartTest, StoppedWhileStreamsRunAndTheNextOneGoesOn) {
  RunAndRestart(SIGTERM);
  if (HasFatalFailure()) return;
  for (const auto& client : clients_) {
    const grpc::Status status = client->Attach(second_->inference());
    EXPECT_TRUE(status.ok()) << client->request().request_id() << ": " << status.error_message();
  }
  ExpectUndisturbed();
  second_->ExpectIdle();
}

// A disk that is full, as far as the coordinator can tell: its files may not grow.
TEST_F(CoordinatorRestartTest, AFullDiskStopsAdmissionAndHoldsStreams) {
  ASSERT_OK_AND_ASSIGN(first_, Cluster::Start(options_));
  Client client(Request("running", 100));
  std::thread running([this, &client]() {
    const grpc::Status status = client.Generate(first_->inference());
    EXPECT_TRUE(status.ok()) << status.error_message();
  });
  client.WaitForTokens(5);
  const pid_t pid = first_->coordinator().pid();
  struct rlimit limit;
  ASSERT_EQ(prlimit(pid, RLIMIT_FSIZE, nullptr, &limit), 0);
  const rlim_t soft = limit.rlim_cur;
  limit.rlim_cur = 1;
  ASSERT_EQ(prlimit(pid, RLIMIT_FSIZE, &limit, nullptr), 0);
  const auto ready = [this]() { return first_->Status().state() == "READY"; };
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (ready() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_THAT(first_->Status().state_detail(), HasSubstr("the request journal cannot be written"));
  grpc::ClientContext context;
  GenerateResult result;
  const grpc::Status refused =
      first_->inference()->GenerateOnce(&context, Request("refused", 2), &result);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(ReasonOf(refused), "JOURNAL_UNWRITABLE");
  // There is room again.
  limit.rlim_cur = soft;
  ASSERT_EQ(prlimit(pid, RLIMIT_FSIZE, &limit, nullptr), 0);
  running.join();
  ASSERT_OK(first_->WaitReady(absl::Seconds(30)));
  const auto undisturbed = first_->Generate(Request("running", 100));  // joins it
  ASSERT_OK(undisturbed);
  client.ExpectEquals(*undisturbed);
}

TEST_F(CoordinatorRestartTest, TwoCannotShareAJournal) {
  ASSERT_OK_AND_ASSIGN(first_, Cluster::Start(options_));
  const auto second = Cluster::StartCoordinator(options_, first_->workers().addresses);
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(second.status().message(),
              AllOf(HasSubstr(absl::StrCat("in use by process ", first_->coordinator().pid())),
                    HasSubstr(options_.coordinator_flags[1])));
  ASSERT_OK(first_->Generate(Request("r", 2)));
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
