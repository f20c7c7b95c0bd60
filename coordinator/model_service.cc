// ModelService: see model_service.h.
#include "coordinator/model_service.h"

#include "coordinator/request_validator.h"
#include "coordinator/rpc_util.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

using inference::v1::GetModelRequest;
using inference::v1::GetServerStatusRequest;
using inference::v1::ListModelsRequest;
using inference::v1::ListModelsResponse;
using inference::v1::ServerStatus;
using ModelMessage = inference::v1::Model;

void Describe(const ServedModel& model, bool ready, ModelMessage* out) {
  out->set_name(model.name);
  for (const std::string& alias : model.aliases) out->add_aliases(alias);
  out->set_architecture(model.architecture);
  out->set_quantization(model.quantization);
  out->set_vocab_size(model.vocab_size);
  out->set_max_context(model.max_context);
  out->set_tensor_parallel(model.tensor_parallel);
  out->set_activation_dtype(model.activation_dtype);
  out->set_activation_quant(model.activation_quant);
  out->set_kv_capacity_tokens(model.kv_capacity_tokens);
  out->set_checkpoint_digest(model.checkpoint_digest);
  out->set_ready(ready);
  out->set_has_tokenizer(model.tokenizer != nullptr);
  for (const int32_t id : model.eos_token_ids) out->add_eos_token_ids(id);
  out->set_max_message_bytes(kPublicMessageBytes);
}

}  // namespace

grpc::ServerUnaryReactor* ModelServiceImpl::GetModel(grpc::CallbackServerContext* context,
                                                     const grpc::ByteBuffer* request,
                                                     grpc::ByteBuffer* response) {
  return HandleUnary<GetModelRequest, ModelMessage>(
      authorizer_, context, request, response, [this](const auto& in, auto* out) -> absl::Status {
        ASSIGN_OR_RETURN(const auto model, backend_->Model());
        RETURN_IF_ERROR(CheckModelName(in.name(), *model));
        Describe(*model, backend_->Ready().ok(), out);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* ModelServiceImpl::ListModels(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request,
                                                       grpc::ByteBuffer* response) {
  return HandleUnary<ListModelsRequest, ListModelsResponse>(
      authorizer_, context, request, response, [this](const auto&, auto* out) {
        const auto model = backend_->Model();
        if (model.ok()) Describe(**model, backend_->Ready().ok(), out->add_models());
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* ModelServiceImpl::GetServerStatus(grpc::CallbackServerContext* context,
                                                            const grpc::ByteBuffer* request,
                                                            grpc::ByteBuffer* response) {
  return HandleUnary<GetServerStatusRequest, ServerStatus>(authorizer_, context, request, response,
                                                           [this](const auto&, auto* out) {
                                                             *out = backend_->Status();
                                                             return absl::OkStatus();
                                                           });
}

}  // namespace lockstep
