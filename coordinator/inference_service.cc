// InferenceService: see inference_service.h.
#include "coordinator/inference_service.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "coordinator/errors.h"
#include "coordinator/generate_calls.h"
#include "coordinator/rpc_util.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

using inference::v1::CancelGenerationRequest;
using inference::v1::CancelGenerationResponse;
using inference::v1::CountTokensRequest;
using inference::v1::CountTokensResponse;
using inference::v1::DetokenizeRequest;
using inference::v1::DetokenizeResponse;
using inference::v1::TokenizeRequest;
using inference::v1::TokenizeResponse;

// The served model, after a check of the name that was asked for.
absl::StatusOr<std::shared_ptr<const ServedModel>> FindModel(const ServingBackend& backend,
                                                             const std::string& name) {
  absl::StatusOr<std::shared_ptr<const ServedModel>> model = backend.Model();
  if (!model.ok()) return model;
  RETURN_IF_ERROR(CheckModelName(name, **model));
  return model;
}

// The ids of the `text` or `chat` of a request that has both as alternatives.
template <typename Request>
absl::StatusOr<std::vector<int32_t>> EncodeInput(const Request& request, const ServedModel& model) {
  if (request.has_text()) return EncodeText(request.text(), "text", model);
  if (request.has_chat()) {
    ASSIGN_OR_RETURN(const std::string text, RenderChat(request.chat(), model));
    return EncodeText(text, "chat.messages", model);
  }
  return InvalidField("INPUT_AMBIGUOUS", "input", "no input: set exactly one of its fields");
}

absl::Status CancelRequest(GenerationTable* generations, const CancelGenerationRequest& request,
                           CancelGenerationResponse* response) {
  if (request.request_id().empty()) {
    return InvalidField("REQUEST_ID_INVALID", "request_id", "request_id is empty");
  }
  ErrorDetail detail;
  detail.reason = "CLIENT";
  const absl::Status ending = MakeError(
      absl::StatusCode::kCancelled,
      request.reason().empty() ? "cancelled by CancelGeneration"
                               : absl::StrCat("cancelled by CancelGeneration: ", request.reason()),
      detail);
  switch (generations->Cancel(request.request_id(), ending)) {
    case CancelResult::kCancelled:
      response->set_outcome(CancelGenerationResponse::CANCELLED);
      return absl::OkStatus();
    case CancelResult::kAlreadyFinished:
      response->set_outcome(CancelGenerationResponse::ALREADY_FINISHED);
      return absl::OkStatus();
    case CancelResult::kNotFound:
      break;
  }
  detail.reason = "REQUEST_NOT_FOUND";
  detail.metadata = {{"request_id", request.request_id()}};
  return MakeError(absl::StatusCode::kNotFound,
                   absl::StrCat("request ", request.request_id(),
                                " is not known here: it was never submitted or ended long ago"),
                   detail);
}

absl::Status TokenizeInput(const ServingBackend& backend, const TokenizeRequest& request,
                           TokenizeResponse* response) {
  ASSIGN_OR_RETURN(const auto model, FindModel(backend, request.model()));
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, EncodeInput(request, *model));
  for (const int32_t id : ids) {
    response->add_token_ids(id);
    const absl::string_view bytes = model->tokenizer->TokenBytes(id, /*skip_special=*/false);
    response->add_tokens(bytes.data(), bytes.size());
  }
  return absl::OkStatus();
}

absl::Status DetokenizeIds(const ServingBackend& backend, const DetokenizeRequest& request,
                           DetokenizeResponse* response) {
  ASSIGN_OR_RETURN(const auto model, FindModel(backend, request.model()));
  RETURN_IF_ERROR(CheckTokenIds(request.token_ids(), "token_ids", model->vocab_size));
  if (model->tokenizer == nullptr) {
    ErrorDetail detail;
    detail.reason = "FEATURE_UNSUPPORTED";
    return MakeError(absl::StatusCode::kUnimplemented,
                     absl::StrCat("model ", model->name,
                                  " has no tokenizer, so it gives no text; use token ids"),
                     detail);
  }
  const std::vector<int32_t> ids(request.token_ids().begin(), request.token_ids().end());
  response->set_raw_bytes(model->tokenizer->DecodeBytes(ids, request.skip_special()));
  response->set_text(ToValidUtf8(response->raw_bytes()));
  return absl::OkStatus();
}

absl::Status CountInput(const ServingBackend& backend, const CountTokensRequest& request,
                        CountTokensResponse* response) {
  ASSIGN_OR_RETURN(const auto model, FindModel(backend, request.model()));
  response->set_max_context(model->max_context);
  if (request.has_token_ids()) {
    RETURN_IF_ERROR(CheckTokenIds(request.token_ids().ids(), "token_ids.ids", model->vocab_size));
    response->set_tokens(request.token_ids().ids_size());
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, EncodeInput(request, *model));
  response->set_tokens(static_cast<int64_t>(ids.size()));
  return absl::OkStatus();
}

}  // namespace

InferenceServiceImpl::InferenceServiceImpl(ServingBackend* backend, const Authorizer* authorizer,
                                           const GenerationTableOptions& generations,
                                           const RequestLimits& limits)
    : backend_(backend),
      authorizer_(authorizer),
      generations_(backend, generations),
      limits_(limits) {}

void InferenceServiceImpl::FillFresh(RequestContext* context) {
  absl::MutexLock lock(&mutex_);
  context->fresh_seed = absl::Uniform<uint64_t>(random_);
  // A random UUID (version 4, variant 1).
  const uint64_t high = (absl::Uniform<uint64_t>(random_) & ~0xf000ull) | 0x4000ull;
  const uint64_t low = (absl::Uniform<uint64_t>(random_) >> 2) | (1ull << 63);
  context->fresh_request_id =
      absl::StrFormat("%08x-%04x-%04x-%04x-%012x", high >> 32, (high >> 16) & 0xffff, high & 0xffff,
                      low >> 48, low & 0xffffffffffffull);
}

absl::StatusOr<GenerationSpec> InferenceServiceImpl::Prepare(
    const grpc::CallbackServerContext& context, const grpc::ByteBuffer& bytes) {
  RETURN_IF_ERROR(authorizer_->Check(context));
  ASSIGN_OR_RETURN(const auto model, backend_->Model());
  inference::v1::GenerateRequest request;
  RETURN_IF_ERROR(ReadMessage(bytes, &request));
  RequestContext outside;
  outside.now = absl::Now();
  outside.rpc_deadline = DeadlineOf(context);
  FillFresh(&outside);
  return ValidateGenerateRequest(request, *model, outside, limits_);
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* InferenceServiceImpl::Generate(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  absl::StatusOr<GenerationSpec> spec = Prepare(*context, *request);
  const std::shared_ptr<GenerateStream> call = GenerateStream::Create(context, &generations_);
  if (spec.ok()) {
    call->Begin(*std::move(spec));
  } else {
    call->Fail(spec.status());
  }
  return call.get();
}

grpc::ServerUnaryReactor* InferenceServiceImpl::GenerateOnce(grpc::CallbackServerContext* context,
                                                             const grpc::ByteBuffer* request,
                                                             grpc::ByteBuffer* response) {
  absl::StatusOr<GenerationSpec> spec = Prepare(*context, *request);
  const auto call = lockstep::GenerateOnce::Create(context, response, &generations_);
  if (spec.ok()) {
    call->Begin(*std::move(spec));
  } else {
    call->Fail(spec.status());
  }
  return call.get();
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* InferenceServiceImpl::AttachGeneration(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes) {
  const std::shared_ptr<GenerateStream> call = GenerateStream::Create(context, &generations_);
  inference::v1::AttachGenerationRequest request;
  absl::Status status = authorizer_->Check(*context);
  if (status.ok()) status = ReadMessage(*bytes, &request);
  // Before the model is loaded it is not known yet which requests a journal gives back.
  if (status.ok()) status = backend_->Model().status();
  if (status.ok()) {
    call->Attach(request);
  } else {
    call->Fail(status);
  }
  return call.get();
}

grpc::ServerUnaryReactor* InferenceServiceImpl::CancelGeneration(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
    grpc::ByteBuffer* response) {
  return HandleUnary<CancelGenerationRequest, CancelGenerationResponse>(
      authorizer_, context, request, response,
      [this](const auto& in, auto* out) { return CancelRequest(&generations_, in, out); });
}

grpc::ServerUnaryReactor* InferenceServiceImpl::Tokenize(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request,
                                                         grpc::ByteBuffer* response) {
  return HandleUnary<TokenizeRequest, TokenizeResponse>(
      authorizer_, context, request, response,
      [this](const auto& in, auto* out) { return TokenizeInput(*backend_, in, out); });
}

grpc::ServerUnaryReactor* InferenceServiceImpl::Detokenize(grpc::CallbackServerContext* context,
                                                           const grpc::ByteBuffer* request,
                                                           grpc::ByteBuffer* response) {
  return HandleUnary<DetokenizeRequest, DetokenizeResponse>(
      authorizer_, context, request, response,
      [this](const auto& in, auto* out) { return DetokenizeIds(*backend_, in, out); });
}

grpc::ServerUnaryReactor* InferenceServiceImpl::CountTokens(grpc::CallbackServerContext* context,
                                                            const grpc::ByteBuffer* request,
                                                            grpc::ByteBuffer* response) {
  return HandleUnary<CountTokensRequest, CountTokensResponse>(
      authorizer_, context, request, response,
      [this](const auto& in, auto* out) { return CountInput(*backend_, in, out); });
}

}  // namespace lockstep
