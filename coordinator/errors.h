// Errors as clients see them: a status code, a message for people, and machine-readable details
// (google.rpc.ErrorInfo with a reason; BadRequest with the field path for input faults; RetryInfo
// where a retry helps). Carried as a payload of absl::Status until an adapter turns it into a
// grpc::Status.
//
// Rule: a client fault never gives UNAVAILABLE, INTERNAL or UNKNOWN; a server fault never gives
// INVALID_ARGUMENT.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace lockstep {

struct ErrorDetail {
  std::string reason;  // "CONTEXT_LENGTH_EXCEEDED"
  std::string field;   // proto field path, empty when it is not about a field
  std::vector<std::pair<std::string, std::string>> metadata;
  absl::Duration retry_after = absl::ZeroDuration();  // 0: no RetryInfo
};

// A status with details. `message` is made valid UTF-8.
absl::Status MakeError(absl::StatusCode code, absl::string_view message, const ErrorDetail& detail);
// INVALID_ARGUMENT about one field.
absl::Status InvalidField(absl::string_view reason, absl::string_view field,
                          absl::string_view message,
                          std::vector<std::pair<std::string, std::string>> metadata = {});
// ALREADY_EXISTS REQUEST_ID_REUSED: the id belongs to a request that runs or has `finished`.
absl::Status RequestIdReused(absl::string_view request_id, bool finished, bool same_body);
// The reason of a status made by MakeError, or "".
std::string ReasonOf(const absl::Status& status);
// The reason, or the name of the code where there is none.
std::string ReasonOrCode(const absl::Status& status);
// The serialized google.rpc.Status payload (what travels in grpc-status-details-bin), or "".
std::string DetailsOf(const absl::Status& status);
// The status that DetailsOf, code and message were taken from.
absl::Status FromDetails(absl::StatusCode code, absl::string_view message,
                         absl::string_view details);

}  // namespace lockstep
