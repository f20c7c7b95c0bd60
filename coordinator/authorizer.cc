// Authorizer: see authorizer.h.
#include "coordinator/authorizer.h"

#include <utility>

#include "absl/strings/match.h"
#include "coordinator/errors.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

constexpr absl::string_view kScheme = "Bearer ";

absl::Status Unauthenticated(absl::string_view reason, absl::string_view message) {
  ErrorDetail detail;
  detail.reason = std::string(reason);
  return MakeError(absl::StatusCode::kUnauthenticated, message, detail);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Authorizer>> Authorizer::Open(const std::string& token_file,
                                                             absl::string_view flag) {
  std::unique_ptr<TokenFile> tokens;
  if (!token_file.empty()) {
    ASSIGN_OR_RETURN(tokens, TokenFile::Open(token_file, flag));
  }
  return std::unique_ptr<Authorizer>(new Authorizer(std::move(tokens)));
}

absl::Status Authorizer::Check(const grpc::CallbackServerContext& context) const {
  if (tokens_ == nullptr) return absl::OkStatus();
  const auto [begin, end] = context.client_metadata().equal_range("authorization");
  if (begin == end) {
    return Unauthenticated("TOKEN_MISSING",
                           "this server asks for a token: send it as the metadata "
                           "\"authorization: Bearer TOKEN\"");
  }
  const absl::string_view value(begin->second.data(), begin->second.size());
  if (std::next(begin) == end && absl::StartsWith(value, kScheme) &&
      tokens_->Accepts(value.substr(kScheme.size()))) {
    return absl::OkStatus();
  }
  return Unauthenticated("TOKEN_INVALID",
                         "the authorization of this call is not accepted: it must be one \"Bearer "
                         "TOKEN\" with a token that this server knows now");
}

}  // namespace lockstep
