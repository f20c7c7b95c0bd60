// Authorizer: whether a call may be made at all: by its bearer token ("authorization: Bearer TOKEN"
// in the call's metadata). Who connects is the transport's matter (security/tls.h). Thread safe.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"
#include "security/token_file.h"

namespace lockstep {

class Authorizer {
 public:
  // Lets every call pass when `token_file` is empty. Errors as of TokenFile::Open.
  static absl::StatusOr<std::unique_ptr<Authorizer>> Open(const std::string& token_file,
                                                          absl::string_view flag);

  // UNAUTHENTICATED TOKEN_MISSING or TOKEN_INVALID.
  absl::Status Check(const grpc::CallbackServerContext& context) const;

 private:
  explicit Authorizer(std::unique_ptr<TokenFile> tokens) : tokens_(std::move(tokens)) {}

  const std::unique_ptr<TokenFile> tokens_;  // nullptr: everybody
};

}  // namespace lockstep
