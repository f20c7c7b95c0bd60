// AttachGeneration, several readers, detachable requests and slow consumers, over real gRPC against
// a fake backend.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/fake_serving_backend.h"
#include "coordinator/listener.h"
#include "coordinator/public_server.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "models/tokenizer/fake_tokenizer.h"
#include "proto/error_details.pb.h"
#include "proto/inference.grpc.pb.h"

namespace lockstep {
namespace {

using inference::v1::AttachGenerationRequest;
using inference::v1::GenerateEvent;
using inference::v1::GenerateRequest;
using inference::v1::GenerateResult;
using ::testing::HasSubstr;
using Stream = std::unique_ptr<grpc::ClientReader<GenerateEvent>>;

class AttachTest : public ::testing::Test {
 protected:
  void Serve(absl::Duration attach_grace, absl::Duration slow_consumer_timeout) {
    auto model = std::make_shared<ServedModel>();
    model->name = "tiny";
    model->vocab_size = 300;
    model->max_context = 4096;
    model->tokenizer = std::make_shared<FakeTokenizer>();
    backend_.SetModel(std::shared_ptr<const ServedModel>(model));
    GenerationTableOptions options;
    options.attach_grace = attach_grace;
    options.slow_consumer_timeout = slow_consumer_timeout;
    ListenOptions listen;
    listen.address = "127.0.0.1:0";
    auto server = PublicServer::Start(listen, &backend_, options);
    ASSERT_OK(server);
    server_ = *std::move(server);
    // A flow-control window of 64 KiB that does not grow.
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 64 << 10);
    stub_ = inference::v1::InferenceService::NewStub(
        grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                  grpc::InsecureChannelCredentials(), arguments));
  }
  void SetUp() override { Serve(absl::Minutes(5), absl::Minutes(5)); }

  static GenerateRequest Request(const std::string& id, bool detachable = false) {
    GenerateRequest request;
    request.set_request_id(id);
    request.set_text("Hello world");
    request.mutable_sampling()->set_seed(1);
    request.set_detachable(detachable);
    return request;
  }
  Stream Attach(grpc::ClientContext* context, const std::string& id,
                const std::vector<uint64_t>& after = {}) {
    AttachGenerationRequest request;
    request.set_request_id(id);
    for (const uint64_t offset : after) request.add_after_sequence(offset);
    return stub_->AttachGeneration(context, request);
  }
  static std::string Reason(const grpc::Status& status) {
    google::rpc::Status wire;
    google::rpc::ErrorInfo info;
    if (!wire.ParseFromString(status.error_details()) || wire.details().empty()) return "";
    return wire.details(0).UnpackTo(&info) ? info.reason() : "";
  }
  // The status of an attach that gives no event.
  grpc::Status AttachStatus(const std::string& id, const std::vector<uint64_t>& after = {}) {
    grpc::ClientContext context;
    const Stream stream = Attach(&context, id, after);
    GenerateEvent event;
    EXPECT_FALSE(stream->Read(&event));
    return stream->Finish();
  }
  // Reads one event, which must be the one of this number.
  static void ReadOne(grpc::ClientReader<GenerateEvent>* stream, uint64_t sequence) {
    GenerateEvent event;
    ASSERT_TRUE(stream->Read(&event));
    EXPECT_EQ(event.sequence(), sequence);
    EXPECT_EQ(event.first_sequence(), 0u);
  }
  // Reads to the end; everything after event `last` must come, without gaps. Tokens in order.
  struct Rest {
    std::vector<int32_t> ids;
    uint64_t last = 0;
    grpc::Status status;
  };
  static Rest ReadAll(grpc::ClientReader<GenerateEvent>* stream, uint64_t last) {
    Rest rest;
    rest.last = last;
    GenerateEvent event;
    while (stream->Read(&event)) {
      EXPECT_EQ(event.first_sequence() > 0 ? event.first_sequence() : event.sequence(),
                rest.last + 1);
      rest.last = event.sequence();
      rest.ids.insert(rest.ids.end(), event.delta().token_ids().begin(),
                      event.delta().token_ids().end());
    }
    rest.status = stream->Finish();
    return rest;
  }
  static std::vector<int32_t> Range(int first, int end) {
    std::vector<int32_t> ids;
    for (int i = first; i < end; ++i) ids.push_back(i);
    return ids;
  }
  static void SendTokens(const FakeServingBackend::Entry& entry, int first, int end) {
    for (int i = first; i < end; ++i) FakeServingBackend::SendToken(entry, i);
  }
  static void Complete(const FakeServingBackend::Entry& entry, int tokens) {
    FakeServingBackend::SendFinished(entry, tokens);
    entry.sink->OnDone(absl::OkStatus());
  }

  FakeServingBackend backend_;
  std::unique_ptr<PublicServer> server_;
  std::unique_ptr<inference::v1::InferenceService::Stub> stub_;
};

TEST_F(AttachTest, AtEveryOffsetGivesExactlyTheMissingEvents) {
  constexpr int kTokens = 12;
  grpc::ClientContext context;
  const Stream first = stub_->Generate(&context, Request("r"));
  const auto entry = backend_.WaitForRequest(1);
  ASSERT_NE(entry, nullptr);
  FakeServingBackend::SendAccepted(*entry);
  SendTokens(*entry, 0, kTokens);
  // While it runs, at each offset; they go on live.
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<Stream> streams;
  for (uint64_t offset = 0; offset <= kTokens + 1; ++offset) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    streams.push_back(Attach(contexts.back().get(), "r", {offset}));
    if (offset <= kTokens) ReadOne(streams.back().get(), offset + 1);
  }
  SendTokens(*entry, kTokens, kTokens + 5);
  Complete(*entry, kTokens + 5);
  for (uint64_t offset = 0; offset <= kTokens + 1; ++offset) {
    const uint64_t had = std::min<uint64_t>(offset + 1, kTokens + 1);
    const Rest rest = ReadAll(streams[offset].get(), had);
    EXPECT_TRUE(rest.status.ok());
    EXPECT_EQ(rest.last, kTokens + 7u);
    EXPECT_EQ(rest.ids, Range(static_cast<int>(had) - 1, kTokens + 5));
  }
  EXPECT_EQ(ReadAll(first.get(), 0).ids, Range(0, kTokens + 5));
  // And after its end, to which nothing is missing at last.
  for (uint64_t offset = 0; offset <= kTokens + 7; ++offset) {
    grpc::ClientContext again;
    const Stream stream = Attach(&again, "r", {offset});
    const Rest rest = ReadAll(stream.get(), offset);
    EXPECT_TRUE(rest.status.ok());
    EXPECT_EQ(rest.last, kTokens + 7u);
  }
}

TEST_F(AttachTest, RefusalsSayWhy) {
  grpc::ClientContext context;
  const Stream stream = stub_->Generate(&context, Request("r"));
  const auto entry = backend_.WaitForRequest(1);
  ASSERT_NE(entry, nullptr);
  FakeServingBackend::SendAccepted(*entry);
  FakeServingBackend::SendToken(*entry, 0);

  grpc::Status status = AttachStatus("");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Reason(status), "REQUEST_ID_INVALID");
  status = AttachStatus("nobody");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Reason(status), "REQUEST_NOT_FOUND");
  status = AttachStatus("r", {3});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(Reason(status), "SEQUENCE_NOT_REACHED");
  EXPECT_THAT(status.error_message(), HasSubstr("the last event of output 0 is 2"));
  status = AttachStatus("r", {0, 0});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Reason(status), "LIMIT_EXCEEDED");
  Complete(*entry, 1);
  EXPECT_TRUE(ReadAll(stream.get(), 0).status.ok());

  ErrorDetail loading;
  loading.reason = "MODEL_LOADING";
  backend_.SetModel(MakeError(absl::StatusCode::kUnavailable, "loading", loading));
  status = AttachStatus("r");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Reason(status), "MODEL_LOADING") << "a journal may still give it back";
}

TEST_F(AttachTest, AnEndedRequestIsForgottenAfterTheGrace) {
  server_.reset();
  Serve(absl::Milliseconds(50), absl::Minutes(5));
  backend_.SetAutoTokens(3);
  grpc::ClientContext context;
  const Stream stream = stub_->Generate(&context, Request("r"));
  EXPECT_TRUE(ReadAll(stream.get(), 0).status.ok());
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (server_->generations().stats().requests > 0 && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  const grpc::Status status = AttachStatus("r");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(Reason(status), "EVENT_LOG_TRUNCATED");
}

TEST_F(AttachTest, TheSameRequestAgainJoinsFromTheStart) {
  grpc::ClientContext context;
  const Stream first = stub_->Generate(&context, Request("r"));
  const auto entry = backend_.WaitForRequest(1);
  ASSERT_NE(entry, nullptr);
  FakeServingBackend::SendAccepted(*entry);
  SendTokens(*entry, 0, 5);
  grpc::ClientContext second_context, once_context, other_context;
  const Stream second = stub_->Generate(&second_context, Request("r"));
  for (uint64_t i = 1; i <= 6; ++i) ReadOne(second.get(), i);
  GenerateRequest other = Request("r");
  other.set_text("something else");
  GenerateResult result;
  const grpc::Status refused = stub_->GenerateOnce(&other_context, other, &result);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(Reason(refused), "REQUEST_ID_REUSED");
  SendTokens(*entry, 5, 8);
  Complete(*entry, 8);
  EXPECT_EQ(ReadAll(first.get(), 0).ids, Range(0, 8));
  EXPECT_EQ(ReadAll(second.get(), 6).ids, Range(5, 8));
  ASSERT_TRUE(stub_->GenerateOnce(&once_context, Request("r"), &result).ok());
  EXPECT_EQ(result.outputs(0).token_ids_size(), 8);
  EXPECT_EQ(result.accepted().prompt_tokens(), 2);
}

TEST_F(AttachTest, AfterACancelTheIdBeginsAnew) {
  backend_.HoldCancels();
  for (const bool once : {false, true}) {
    const std::string id = once ? "once" : "stream";
    const size_t before = once ? 2 : 0;
    grpc::ClientContext context, cancel_context, again_context;
    const Stream stream = stub_->Generate(&context, Request(id));
    const auto entry = backend_.WaitForRequest(before + 1);
    ASSERT_NE(entry, nullptr);
    FakeServingBackend::SendAccepted(*entry);
    SendTokens(*entry, 0, 5);
    inference::v1::CancelGenerationRequest cancel;
    inference::v1::CancelGenerationResponse response;
    cancel.set_request_id(id);
    ASSERT_TRUE(stub_->CancelGeneration(&cancel_context, cancel, &response).ok());
    // The engine has not ended it yet, and even shows one more token.
    Stream again;
    GenerateResult result;
    std::thread unary;
    if (once) {
      unary = std::thread(
          [&]() { EXPECT_TRUE(stub_->GenerateOnce(&again_context, Request(id), &result).ok()); });
    } else {
      again = stub_->Generate(&again_context, Request(id));
    }
    SendTokens(*entry, 5, 6);
    FakeServingBackend::EndCancelled(entry);
    const Rest cancelled = ReadAll(stream.get(), 0);
    EXPECT_EQ(cancelled.status.error_code(), grpc::StatusCode::CANCELLED);
    EXPECT_EQ(cancelled.ids, Range(0, 6));
    const auto fresh = backend_.WaitForRequest(before + 2);
    ASSERT_NE(fresh, nullptr);
    FakeServingBackend::SendAccepted(*fresh);
    SendTokens(*fresh, 0, 2);
    Complete(*fresh, 2);
    if (once) {
      unary.join();
      EXPECT_EQ(result.outputs(0).token_ids_size(), 2);
    } else {
      const Rest rest = ReadAll(again.get(), 0);
      EXPECT_TRUE(rest.status.ok());
      EXPECT_EQ(rest.ids, Range(0, 2));
      EXPECT_EQ(rest.last, 4u);
    }
  }
}

TEST_F(AttachTest, ACallThatWaitsForACancelledOneCanBeEnded) {
  backend_.HoldCancels();
  grpc::ClientContext context, cancel_context;
  const Stream stream = stub_->Generate(&context, Request("r"));
  const auto entry = backend_.WaitForRequest(1);
  ASSERT_NE(entry, nullptr);
  inference::v1::CancelGenerationRequest cancel;
  inference::v1::CancelGenerationResponse response;
  cancel.set_request_id("r");
  ASSERT_TRUE(stub_->CancelGeneration(&cancel_context, cancel, &response).ok());
  for (const bool once : {false, true}) {
    grpc::ClientContext waiting;
    waiting.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(100)));
    GenerateResult result;
    const grpc::Status status = once ? stub_->GenerateOnce(&waiting, Request("r"), &result)
                                     : stub_->Generate(&waiting, Request("r"))->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  // Ends only when every call has: those that wait too. What comes then starts nothing.
  server_.reset();
  EXPECT_FALSE(ReadAll(stream.get(), 0).status.ok());
  FakeServingBackend::EndCancelled(entry);
  EXPECT_EQ(backend_.requests(), 1u);
}

TEST_F(AttachTest, ADroppedReaderLeavesTheOtherAlone) {
  grpc::ClientContext context, second_context;
  const Stream first = stub_->Generate(&context, Request("r"));
  const auto entry = backend_.WaitForRequest(1);
  ASSERT_NE(entry, nullptr);
  FakeServingBackend::SendAccepted(*entry);
  const Stream second = Attach(&second_context, "r");
  ReadOne(second.get(), 1);
  context.TryCancel();
  EXPECT_EQ(ReadAll(first.get(), 0).status.error_code(), grpc::StatusCode::CANCELLED);
  SendTokens(*entry, 0, 3);
  for (uint64_t i = 2; i <= 4; ++i) ReadOne(second.get(), i);
  EXPECT_OK(backend_.CancelledWith(entry));
  second_context.TryCancel();
  EXPECT_EQ(ReadAll(second.get(), 4).status.error_code(), grpc::StatusCode::CANCELLED);
  ASSERT_TRUE(backend_.WaitForCancel(entry));
  EXPECT_EQ(ReasonOf(backend_.CancelledWith(entry)), "CLIENT");
}

TEST_F(AttachTest, ADetachableRequestOutlivesItsReader) {
  for (const bool deadline : {false, true}) {
    const std::string id = deadline ? "deadline" : "drop";
    grpc::ClientContext context;
    if (deadline) {
      context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(200)));
    }
    const Stream first = stub_->Generate(&context, Request(id, true));
    const auto entry = backend_.WaitForRequest(deadline ? 2 : 1);
    ASSERT_NE(entry, nullptr);
    EXPECT_EQ(entry->spec.deadline, absl::InfiniteFuture());
    FakeServingBackend::SendAccepted(*entry);
    SendTokens(*entry, 0, 4);
    for (uint64_t i = 1; i <= 3; ++i) ReadOne(first.get(), i);
    if (!deadline) context.TryCancel();
    ReadAll(first.get(), 3);
    SendTokens(*entry, 4, 8);
    EXPECT_OK(backend_.CancelledWith(entry));
    grpc::ClientContext again;
    const Stream second = Attach(&again, id, {3});
    Complete(*entry, 8);
    const Rest rest = ReadAll(second.get(), 3);
    EXPECT_TRUE(rest.status.ok());
    EXPECT_EQ(rest.ids, Range(2, 8));
    EXPECT_OK(backend_.CancelledWith(entry));
  }
}

TEST_F(AttachTest, ADetachableRequestThatNobodyReadsIsCancelledAfterTheGrace) {
  server_.reset();
  Serve(absl::Milliseconds(300), absl::Minutes(5));
  grpc::ClientContext context;
  const Stream first = stub_->Generate(&context, Request("r", true));
  const auto entry = backend_.WaitForRequest(1);
  ASSERT_NE(entry, nullptr);
  const absl::Time dropped = absl::Now();
  context.TryCancel();
  ReadAll(first.get(), 0);
  ASSERT_TRUE(backend_.WaitForCancel(entry));
  EXPECT_GE(absl::Now() - dropped, absl::Milliseconds(300));
  EXPECT_EQ(ReasonOf(backend_.CancelledWith(entry)), "ABANDONED");
}

// A client that does not read: flow control stops the server's writes.
TEST_F(AttachTest, AReaderThatSleepsIsEndedAndCostsTheLogOnly) {
  server_.reset();
  Serve(absl::Minutes(5), absl::Milliseconds(300));
  constexpr int kTokens = 200000;
  for (const bool detachable : {false, true}) {
    const std::string id = detachable ? "detachable" : "plain";
    grpc::ClientContext context;
    const Stream sleeper = stub_->Generate(&context, Request(id, detachable));
    const auto entry = backend_.WaitForRequest(detachable ? 2 : 1);
    ASSERT_NE(entry, nullptr);
    const auto log = std::dynamic_pointer_cast<GenerationLog>(entry->sink);
    ASSERT_NE(log, nullptr);
    FakeServingBackend::SendAccepted(*entry);
    SendTokens(*entry, 0, kTokens);
    EXPECT_LT(log->bytes(), kTokens * 64);
    if (!detachable) {
      ASSERT_TRUE(backend_.WaitForCancel(entry));
      EXPECT_EQ(ReasonOf(backend_.CancelledWith(entry)), "SLOW_CONSUMER");
    }
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    while (server_->generations().stats().readers > 0 && absl::Now() < deadline) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    const Rest rest = ReadAll(sleeper.get(), 0);
    EXPECT_EQ(rest.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(Reason(rest.status), "SLOW_CONSUMER");
    EXPECT_EQ(server_->generations().stats().slow_consumers, detachable ? 2 : 1);
    EXPECT_LT(rest.last, static_cast<uint64_t>(kTokens));
    EXPECT_EQ(rest.ids, Range(0, static_cast<int>(rest.last) - 1)) << "what it got has no gaps";
    const auto& trailers = context.GetServerTrailingMetadata();
    const auto last = trailers.find("lockstep-last-sequence");
    ASSERT_NE(last, trailers.end());
    EXPECT_EQ(std::string(last->second.data(), last->second.size()), absl::StrCat(rest.last));
    if (!detachable) continue;
    EXPECT_OK(backend_.CancelledWith(entry));
    Complete(*entry, kTokens);
    grpc::ClientContext again;
    const Stream second = Attach(&again, id, {rest.last});
    const Rest more = ReadAll(second.get(), rest.last);
    EXPECT_TRUE(more.status.ok());
    EXPECT_EQ(more.last, kTokens + 2u);
  }
}

}  // namespace
}  // namespace lockstep
