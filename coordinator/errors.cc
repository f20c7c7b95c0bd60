// Errors with google.rpc details: see errors.h.
#include "coordinator/errors.h"

#include "absl/strings/cord.h"
#include "absl/types/optional.h"
#include "models/tokenizer/utf8.h"
#include "proto/error_details.pb.h"

namespace lockstep {
namespace {

// Payload key: the google.rpc.Status that travels to the client.
constexpr char kPayloadUrl[] = "type.googleapis.com/google.rpc.Status";
constexpr char kDomain[] = "lockstep";

bool ParseDetails(const absl::Status& status, google::rpc::Status* details) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kPayloadUrl);
  return payload.has_value() && details->ParseFromString(std::string(*payload));
}

}  // namespace

absl::Status MakeError(absl::StatusCode code, absl::string_view message,
                       const ErrorDetail& detail) {
  const std::string text = ToValidUtf8(message);
  google::rpc::Status details;
  details.set_code(static_cast<int>(code));
  details.set_message(text);

  google::rpc::ErrorInfo info;
  info.set_reason(ToValidUtf8(detail.reason));
  info.set_domain(kDomain);
  for (const auto& [key, value] : detail.metadata) {
    (*info.mutable_metadata())[ToValidUtf8(key)] = ToValidUtf8(value);
  }
  details.add_details()->PackFrom(info);

  if (!detail.field.empty()) {
    google::rpc::BadRequest bad_request;
    auto* violation = bad_request.add_field_violations();
    violation->set_field(ToValidUtf8(detail.field));
    violation->set_description(text);
    details.add_details()->PackFrom(bad_request);
  }
  if (detail.retry_after > absl::ZeroDuration()) {
    google::rpc::RetryInfo retry;
    const timespec delay = absl::ToTimespec(detail.retry_after);
    retry.mutable_retry_delay()->set_seconds(delay.tv_sec);
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(delay.tv_nsec));
    details.add_details()->PackFrom(retry);
  }
  absl::Status status(code, text);
  status.SetPayload(kPayloadUrl, absl::Cord(details.SerializeAsString()));
  return status;
}

absl::Status InvalidField(absl::string_view reason, absl::string_view field,
                          absl::string_view message,
                          std::vector<std::pair<std::string, std::string>> metadata) {
  ErrorDetail detail;
  detail.reason = std::string(reason);
  detail.field = std::string(field);
  detail.metadata = std::move(metadata);
  return MakeError(absl::StatusCode::kInvalidArgument, message, detail);
}

absl::Status RequestIdReused(absl::string_view request_id, bool finished, bool same_body) {
  ErrorDetail detail;
  detail.reason = "REQUEST_ID_REUSED";
  return MakeError(
      absl::StatusCode::kAlreadyExists,
      absl::StrCat("request_id ", request_id,
                   finished ? " was used by a finished request" : " is in use by a running request",
                   same_body ? " with the same body" : " with another body", ": choose a new one"),
      detail);
}

std::string ReasonOf(const absl::Status& status) {
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  if (!ParseDetails(status, &details) || details.details().empty() ||
      !details.details(0).UnpackTo(&info)) {
    return "";
  }
  return info.reason();
}

std::string ReasonOrCode(const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  return reason.empty() ? absl::StatusCodeToString(status.code()) : reason;
}

std::string DetailsOf(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kPayloadUrl);
  return payload.has_value() ? std::string(*payload) : "";
}

absl::Status FromDetails(absl::StatusCode code, absl::string_view message,
                         absl::string_view details) {
  absl::Status status(code, message);
  if (!details.empty()) status.SetPayload(kPayloadUrl, absl::Cord(details));
  return status;
}

}  // namespace lockstep
