// The public services over real gRPC, against a fake backend.
#include "coordinator/public_server.h"

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/errors.h"
#include "coordinator/fake_serving_backend.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "models/tokenizer/fake_tokenizer.h"
#include "proto/error_details.pb.h"
#include "proto/health.grpc.pb.h"
#include "proto/inference.grpc.pb.h"
#include "proto/model.grpc.pb.h"

namespace lockstep {
namespace {

using grpc::health::v1::Health;
using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;
using inference::v1::GenerateEvent;
using inference::v1::GenerateRequest;
using inference::v1::GenerateResult;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

ListenOptions Loopback() {
  ListenOptions options;
  options.address = "127.0.0.1:0";
  return options;
}

class PublicServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto model = std::make_shared<ServedModel>();
    model->name = "tiny";
    model->vocab_size = 300;
    model->max_context = 4096;
    model->tokenizer = std::make_shared<FakeTokenizer>();
    model->has_chat_template = true;
    backend_.SetModel(std::shared_ptr<const ServedModel>(model));
    auto server = PublicServer::Start(Loopback(), &backend_);
    ASSERT_OK(server);
    server_ = *std::move(server);
    channel_ = grpc::CreateChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                   grpc::InsecureChannelCredentials());
    stub_ = inference::v1::InferenceService::NewStub(channel_);
    models_ = inference::v1::ModelService::NewStub(channel_);
    health_ = Health::NewStub(channel_);
  }

  static GenerateRequest Request(const std::string& id = "r1") {
    GenerateRequest request;
    request.set_request_id(id);
    request.set_text("Hello world");
    return request;
  }
  // The first of the events that one stands for.
  static uint64_t First(const GenerateEvent& event) {
    return event.first_sequence() > 0 ? event.first_sequence() : event.sequence();
  }
  static std::string Trailer(const grpc::ClientContext& context, const std::string& key) {
    const auto& trailers = context.GetServerTrailingMetadata();
    const auto found = trailers.find(key);
    return found == trailers.end() ? "" : std::string(found->second.data(), found->second.size());
  }
  static std::string Reason(const grpc::Status& status) {
    google::rpc::Status wire;
    google::rpc::ErrorInfo info;
    if (!wire.ParseFromString(status.error_details()) || wire.details().empty()) return "";
    return wire.details(0).UnpackTo(&info) ? info.reason() : "";
  }
  HealthCheckResponse::ServingStatus CheckHealth(const std::string& name) {
    grpc::ClientContext context;
    HealthCheckRequest request;
    request.set_service(name);
    HealthCheckResponse response;
    const grpc::Status status = health_->Check(&context, request, &response);
    return status.ok() ? response.status() : HealthCheckResponse::SERVICE_UNKNOWN;
  }

  FakeServingBackend backend_;
  std::unique_ptr<PublicServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<inference::v1::InferenceService::Stub> stub_;
  std::unique_ptr<inference::v1::ModelService::Stub> models_;
  std::unique_ptr<Health::Stub> health_;
};

TEST_F(PublicServerTest, StreamsEventsInOrder) {
  backend_.SetAutoTokens(1000);
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, Request());
  GenerateEvent event;
  uint64_t sequence = 0;
  std::vector<int32_t> ids;
  bool finished = false;
  while (reader->Read(&event)) {
    EXPECT_FALSE(finished);
    EXPECT_EQ(First(event), sequence + 1);
    sequence = event.sequence();
    EXPECT_EQ(event.has_accepted(), sequence == 1);
    if (event.has_delta()) {
      EXPECT_EQ(event.delta().token_offset(), static_cast<int64_t>(ids.size()));
    }
    ids.insert(ids.end(), event.delta().token_ids().begin(), event.delta().token_ids().end());
    finished = event.has_finished();
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(finished);
  ASSERT_EQ(ids.size(), 1000u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(ids[i], i);
}

TEST_F(PublicServerTest, GenerateOnceGivesTheWholeAnswer) {
  backend_.SetAutoTokens(3);
  grpc::ClientContext context;
  GenerateResult result;
  GenerateRequest request = Request("");
  ASSERT_TRUE(stub_->GenerateOnce(&context, request, &result).ok());
  EXPECT_EQ(result.request_id().size(), 36u);  // a fresh UUID
  EXPECT_EQ(result.request_id()[14], '4');
  EXPECT_EQ(result.accepted().prompt_tokens(), 2);
  ASSERT_EQ(result.outputs_size(), 1);
  EXPECT_EQ(result.outputs(0).text(), "t0 t1 t2 ");
  EXPECT_THAT(result.outputs(0).token_ids(), ElementsAre(0, 1, 2));
  EXPECT_EQ(result.outputs(0).finished().reason(), inference::v1::MAX_TOKENS);
  EXPECT_EQ(result.outputs(0).finished().determinism_digest(), 42u);
}

TEST_F(PublicServerTest, BadInputHasCodeReasonAndTheNextRequestIsServed) {
  backend_.SetAutoTokens(1);
  GenerateRequest bad = Request();
  bad.mutable_sampling()->set_temperature(-1);
  {
    grpc::ClientContext context;
    auto reader = stub_->Generate(&context, bad);
    GenerateEvent event;
    EXPECT_FALSE(reader->Read(&event));
    const grpc::Status status = reader->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(Reason(status), "SAMPLING_OUT_OF_RANGE");
  }
  grpc::ClientContext once;
  GenerateResult result;
  EXPECT_EQ(Reason(stub_->GenerateOnce(&once, bad, &result)), "SAMPLING_OUT_OF_RANGE");
  grpc::ClientContext next;
  EXPECT_TRUE(stub_->GenerateOnce(&next, Request("r2"), &result).ok());
}

TEST_F(PublicServerTest, InvalidUtf8OnTheWireIsInvalidArgument) {
  std::string bytes = Request().SerializeAsString();
  bytes.replace(bytes.find("Hello"), 2, "\xc3\x28");
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> generic(channel_);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request(&slice, 1);
  auto call = generic.PrepareUnaryCall(
      &context, "/lockstep.inference.v1.InferenceService/GenerateOnce", request, &queue);
  call->StartCall();
  grpc::ByteBuffer response;
  grpc::Status status;
  int tag_value = 0;
  call->Finish(&response, &status, &tag_value);
  void* tag = nullptr;
  bool ok = false;
  ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Reason(status), "INVALID_UTF8");
  EXPECT_THAT(status.error_message(), HasSubstr("text is not valid UTF-8"));
}

TEST_F(PublicServerTest, SubmitErrorsPassThrough) {
  const struct {
    absl::StatusCode code;
    const char* reason;
  } rows[] = {
      {absl::StatusCode::kAlreadyExists, "REQUEST_ID_REUSED"},
      {absl::StatusCode::kInvalidArgument, "KV_CAPACITY_IMPOSSIBLE"},
      {absl::StatusCode::kResourceExhausted, "QUEUE_FULL"},
      {absl::StatusCode::kUnavailable, "DRAINING"},
      {absl::StatusCode::kUnavailable, "ENGINE_FAILED"},
  };
  for (const auto& row : rows) {
    ErrorDetail detail;
    detail.reason = row.reason;
    backend_.SetSubmitError(MakeError(row.code, "because", detail));
    grpc::ClientContext context;
    auto reader = stub_->Generate(&context, Request());
    const grpc::Status status = reader->Finish();
    EXPECT_EQ(static_cast<int>(status.error_code()), static_cast<int>(row.code));
    EXPECT_EQ(Reason(status), row.reason);
    grpc::ClientContext once;
    GenerateResult result;
    EXPECT_EQ(Reason(stub_->GenerateOnce(&once, Request(), &result)), row.reason);
  }
}

TEST_F(PublicServerTest, FailureTrailersTellHowFarItCame) {
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, Request());
  const auto entry = backend_.WaitForRequest(1);
  ASSERT_NE(entry, nullptr);
  FakeServingBackend::SendAccepted(*entry);
  FakeServingBackend::SendToken(*entry, 0);
  FakeServingBackend::SendToken(*entry, 1);
  ErrorDetail detail;
  detail.reason = "NUMERIC_NAN";
  entry->sink->OnDone(MakeError(absl::StatusCode::kInternal, "NaN logits", detail));
  GenerateEvent event;
  int events = 0;
  while (reader->Read(&event)) ++events;
  EXPECT_EQ(events, 3);
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(Reason(status), "NUMERIC_NAN");
  EXPECT_EQ(Trailer(context, "lockstep-last-sequence"), "3");
  EXPECT_EQ(Trailer(context, "lockstep-prompt-tokens"), "2");
  EXPECT_EQ(Trailer(context, "lockstep-completion-tokens"), "2");
}

TEST_F(PublicServerTest, ClientDropCancels) {
  for (const bool stream : {true, false}) {
    grpc::ClientContext context;
    const std::string id = stream ? "stream" : "once";
    std::unique_ptr<grpc::ClientReader<GenerateEvent>> reader;
    std::thread once;
    GenerateResult result;
    if (stream) {
      reader = stub_->Generate(&context, Request(id));
    } else {
      once = std::thread([&]() {
        const grpc::Status status = stub_->GenerateOnce(&context, Request(id), &result);
        EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
      });
    }
    const auto entry = backend_.WaitForRequest(stream ? 1 : 2);
    ASSERT_NE(entry, nullptr);
    FakeServingBackend::SendAccepted(*entry);
    context.TryCancel();
    ASSERT_TRUE(backend_.WaitForCancel(entry));
    EXPECT_THAT(backend_.CancelledWith(entry), testing::StatusIs(absl::StatusCode::kCancelled));
    EXPECT_EQ(ReasonOf(backend_.CancelledWith(entry)), "CLIENT");
    // Events after the end are dropped without harm.
    FakeServingBackend::SendToken(*entry, 0);
    if (once.joinable()) once.join();
    if (reader != nullptr) {
      EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
    }
  }
}

TEST_F(PublicServerTest, DeadlineReachesTheSpecAndTheClient) {
  grpc::ClientContext context;
  const absl::Time deadline = absl::Now() + absl::Milliseconds(300);
  context.set_deadline(absl::ToChronoTime(deadline));
  auto reader = stub_->Generate(&context, Request());
  const auto entry = backend_.WaitForRequest(1);
  ASSERT_NE(entry, nullptr);
  EXPECT_LT(absl::AbsDuration(entry->spec.deadline - deadline), absl::Milliseconds(200));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(backend_.WaitForCancel(entry));
}

TEST_F(PublicServerTest, CancelGeneration) {
  using inference::v1::CancelGenerationRequest;
  using inference::v1::CancelGenerationResponse;
  const auto cancel = [this](const std::string& id, CancelGenerationResponse* response) {
    grpc::ClientContext context;
    CancelGenerationRequest request;
    request.set_request_id(id);
    request.set_reason("why not");
    return stub_->CancelGeneration(&context, request, response);
  };
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, Request());
  ASSERT_NE(backend_.WaitForRequest(1), nullptr);
  CancelGenerationResponse response;
  ASSERT_TRUE(cancel("r1", &response).ok());
  EXPECT_EQ(response.outcome(), CancelGenerationResponse::CANCELLED);
  const grpc::Status ended = reader->Finish();
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_THAT(ended.error_message(), HasSubstr("why not"));
  ASSERT_TRUE(cancel("r1", &response).ok());
  EXPECT_EQ(response.outcome(), CancelGenerationResponse::ALREADY_FINISHED);
  const grpc::Status unknown = cancel("nobody", &response);
  EXPECT_EQ(unknown.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Reason(unknown), "REQUEST_NOT_FOUND");
  EXPECT_EQ(cancel("", &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(PublicServerTest, TokenizeDetokenizeCount) {
  inference::v1::TokenizeRequest text;
  text.set_text("Hello!");
  inference::v1::TokenizeResponse tokens;
  grpc::ClientContext c1;
  ASSERT_TRUE(stub_->Tokenize(&c1, text, &tokens).ok());
  EXPECT_THAT(tokens.token_ids(), ElementsAre(259, '!'));
  EXPECT_THAT(tokens.tokens(), ElementsAre("Hello", "!"));

  inference::v1::DetokenizeRequest ids;
  ids.add_token_ids(259);
  ids.add_token_ids(0xC3);
  inference::v1::DetokenizeResponse back;
  grpc::ClientContext c2;
  ASSERT_TRUE(stub_->Detokenize(&c2, ids, &back).ok());
  EXPECT_EQ(back.text(), "Hello\xEF\xBF\xBD");
  EXPECT_EQ(back.raw_bytes(), "Hello\xC3");
  ids.add_token_ids(300);
  grpc::ClientContext c3;
  EXPECT_EQ(Reason(stub_->Detokenize(&c3, ids, &back)), "TOKEN_OUT_OF_VOCAB");

  inference::v1::CountTokensRequest count;
  count.mutable_token_ids()->add_ids(1);
  inference::v1::CountTokensResponse counted;
  grpc::ClientContext c4;
  ASSERT_TRUE(stub_->CountTokens(&c4, count, &counted).ok());
  EXPECT_EQ(counted.tokens(), 1);
  EXPECT_EQ(counted.max_context(), 4096);
  grpc::ClientContext c5;
  EXPECT_EQ(Reason(stub_->CountTokens(&c5, {}, &counted)), "INPUT_AMBIGUOUS");
  count.set_model("other");
  grpc::ClientContext c6;
  EXPECT_EQ(stub_->CountTokens(&c6, count, &counted).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(PublicServerTest, WithoutTokenizerTextCallsSaySo) {
  auto model = std::make_shared<ServedModel>();
  model->name = "ids-only";
  model->vocab_size = 300;
  model->max_context = 64;
  backend_.SetModel(std::shared_ptr<const ServedModel>(model));
  inference::v1::TokenizeRequest text;
  text.set_text("x");
  inference::v1::TokenizeResponse tokens;
  grpc::ClientContext c1;
  grpc::Status status = stub_->Tokenize(&c1, text, &tokens);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(status.error_message(), HasSubstr("token_ids"));
  inference::v1::DetokenizeRequest ids;
  inference::v1::DetokenizeResponse back;
  grpc::ClientContext c2;
  status = stub_->Detokenize(&c2, ids, &back);
  EXPECT_EQ(Reason(status), "FEATURE_UNSUPPORTED");
}

TEST_F(PublicServerTest, LoadingIsUnavailable) {
  ErrorDetail detail;
  detail.reason = "MODEL_LOADING";
  detail.retry_after = absl::Seconds(1);
  backend_.SetModel(MakeError(absl::StatusCode::kUnavailable, "loading", detail));
  grpc::ClientContext c1;
  auto reader = stub_->Generate(&c1, Request());
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Reason(status), "MODEL_LOADING");
  inference::v1::Model model;
  grpc::ClientContext c2;
  EXPECT_EQ(Reason(models_->GetModel(&c2, {}, &model)), "MODEL_LOADING");
  inference::v1::ListModelsResponse list;
  grpc::ClientContext c3;
  EXPECT_TRUE(models_->ListModels(&c3, {}, &list).ok());
  EXPECT_EQ(list.models_size(), 0);
  inference::v1::ServerStatus server_status;
  grpc::ClientContext c4;
  EXPECT_TRUE(models_->GetServerStatus(&c4, {}, &server_status).ok());
  EXPECT_EQ(server_status.state(), "LOADING");
}

TEST_F(PublicServerTest, ModelsAreDescribed) {
  inference::v1::Model model;
  inference::v1::GetModelRequest request;
  request.set_name("tiny");
  grpc::ClientContext c1;
  ASSERT_TRUE(models_->GetModel(&c1, request, &model).ok());
  EXPECT_EQ(model.max_context(), 4096);
  EXPECT_TRUE(model.ready());
  EXPECT_TRUE(model.has_tokenizer());
  EXPECT_EQ(model.max_message_bytes(), 64 << 20);
  request.set_name("other");
  grpc::ClientContext c2;
  const grpc::Status status = models_->GetModel(&c2, request, &model);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("tiny"));
}

TEST_F(PublicServerTest, HealthCheckAndWatchFollowReadiness) {
  EXPECT_EQ(CheckHealth(""), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(CheckHealth("lockstep.inference.v1.InferenceService"),
            HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(CheckHealth("liveness"), HealthCheckResponse::SERVING);
  EXPECT_EQ(CheckHealth("worker/0"), HealthCheckResponse::SERVICE_UNKNOWN);
  server_->SetHealth("worker/0", true);
  EXPECT_EQ(CheckHealth("worker/0"), HealthCheckResponse::SERVING);

  grpc::ClientContext context;
  auto watch = health_->Watch(&context, HealthCheckRequest());
  HealthCheckResponse response;
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  for (const bool ready : {true, false, true}) {
    server_->SetReady(ready);
    ASSERT_TRUE(watch->Read(&response));
    EXPECT_EQ(response.status(),
              ready ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING);
  }
  EXPECT_EQ(CheckHealth(""), HealthCheckResponse::SERVING);
  context.TryCancel();
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(PublicServerTest, WatchTellsChangesOnly) {
  grpc::ClientContext context;
  auto watch = health_->Watch(&context, HealthCheckRequest());
  HealthCheckResponse response;
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  bool ready = false;
  for (int i = 0; i < 20; ++i) {
    server_->SetReady(ready);
    // A round trip: what the call above had sent would be on its way by now.
    CheckHealth("");
    ready = !ready;
    server_->SetReady(ready);
    ASSERT_TRUE(watch->Read(&response));
    EXPECT_EQ(response.status(),
              ready ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING);
  }
  context.TryCancel();
  watch->Finish();
}

TEST_F(PublicServerTest, WatchOfAnUnknownNameTellsWhenItIsKnown) {
  grpc::ClientContext context;
  HealthCheckRequest request;
  request.set_service("worker/7");
  auto watch = health_->Watch(&context, request);
  HealthCheckResponse response;
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVICE_UNKNOWN);
  server_->SetHealth("worker/7", true);
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVING);
  context.TryCancel();
  watch->Finish();
}

TEST_F(PublicServerTest, ShutdownEndsWatchesAtOnceWithNotServing) {
  server_->SetReady(true);
  grpc::ClientContext context;
  auto watch = health_->Watch(&context, HealthCheckRequest());
  HealthCheckResponse response;
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVING);
  // A watch that had to be cut off would keep this test for an hour.
  server_->Shutdown(absl::Now() + absl::Hours(1));
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  EXPECT_FALSE(watch->Read(&response));
  const grpc::Status status = watch->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Reason(status), "DRAINING");
}

TEST_F(PublicServerTest, ACallWithoutAMessageIsToldSo) {
  for (const std::string method : {"/lockstep.inference.v1.InferenceService/GenerateOnce",
                                   "/lockstep.inference.v1.ModelService/GetModel"}) {
    grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> generic(channel_);
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    auto call = generic.PrepareCall(&context, method, &queue);
    void* tag = nullptr;
    bool ok = false;
    call->StartCall(nullptr);
    ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
    call->WritesDone(nullptr);
    ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
    grpc::Status status;
    call->Finish(&status, nullptr);
    ASSERT_TRUE(queue.Next(&tag, &ok));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method;
    EXPECT_EQ(Reason(status), "MALFORMED_MESSAGE") << method;
    EXPECT_THAT(status.error_message(), HasSubstr("no request message")) << method;
  }
}

TEST_F(PublicServerTest, ReflectionListsTheServices) {
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> generic(channel_);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  auto call = generic.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  void* tag = nullptr;
  bool ok = false;
  call->StartCall(nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  const grpc::Slice slice(std::string("\x3a\x01*"));  // ServerReflectionRequest.list_services = "*"
  call->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  grpc::ByteBuffer response;
  call->Read(&response, nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  grpc::Slice bytes;
  ASSERT_TRUE(response.DumpToSingleSlice(&bytes).ok());
  const std::string text(reinterpret_cast<const char*>(bytes.begin()), bytes.size());
  EXPECT_THAT(text, HasSubstr("lockstep.inference.v1.InferenceService"));
  EXPECT_THAT(text, HasSubstr("lockstep.inference.v1.ModelService"));
  EXPECT_THAT(text, HasSubstr("grpc.health.v1.Health"));
  grpc::Status status;
  call->Finish(&status, nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok));
}

TEST_F(PublicServerTest, SecondServerOnThePortIsRefused) {
  ListenOptions same = Loopback();
  same.address = absl::StrCat("127.0.0.1:", server_->port());
  const auto second = PublicServer::Start(same, &backend_);
  EXPECT_THAT(second, testing::StatusIs(absl::StatusCode::kFailedPrecondition,
                                        HasSubstr("the port is in use")));
}

TEST_F(PublicServerTest, SlowReaderGetsEverythingInMergedDeltas) {
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, Request());
  const auto entry = backend_.WaitForRequest(1);
  ASSERT_NE(entry, nullptr);
  FakeServingBackend::SendAccepted(*entry);
  constexpr int kTokens = 20000;  // far over the flow-control window while nobody reads
  for (int i = 0; i < kTokens; ++i) FakeServingBackend::SendToken(*entry, i);
  FakeServingBackend::SendFinished(*entry, kTokens);
  entry->sink->OnDone(absl::OkStatus());
  GenerateEvent event;
  uint64_t sequence = 0;
  int next = 0, messages = 0;
  while (reader->Read(&event)) {
    ++messages;
    EXPECT_EQ(First(event), sequence + 1);
    sequence = event.sequence();
    for (const int32_t id : event.delta().token_ids()) EXPECT_EQ(id, next++);
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(next, kTokens);
  EXPECT_EQ(sequence, static_cast<uint64_t>(kTokens) + 2);
  EXPECT_LT(messages, kTokens);
}

}  // namespace
}  // namespace lockstep
