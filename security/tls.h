// TLS for gRPC servers and channels, from PEM files that are read again when they change: a
// certificate is renewed by replacing its files, without a restart. A connection that is open keeps
// the certificate that it was made with.
//
// Who is believed:
// - A client believes a server whose certificate is signed by the client's CA and names, as a DNS
//   or IP subject alternative name, the host of the address that the client called; for unix:
//   addresses the name is "localhost". So a worker's identity is the host that the coordinator's
//   --workers names: a worker with the certificate of another host is refused.
// - A server that has a CA (mutual TLS) believes every client whose certificate is signed by that
//   CA. Workers always ask for one: the CA of worker links is to sign coordinators and workers of
//   one deployment, and nobody else.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"

namespace lockstep {

// PEM files; empty: none.
struct TlsFiles {
  std::string cert;  // own certificate first, then the chain up to the CA
  std::string key;
  std::string ca;  // of the other side

  bool any() const { return !cert.empty() || !key.empty() || !ca.empty(); }
};

// How often the files are looked at.
constexpr unsigned kTlsReloadSeconds = 1;

// Plaintext without files. With them cert and key are needed; with a CA clients must present a
// certificate. `flag` is the beginning of the flags' names in messages, "--tls" for --tls-cert.
// INVALID_ARGUMENT: a flag is missing, or a file is no PEM certificate or key, or they do not
// belong together; NOT_FOUND: a file cannot be read; FAILED_PRECONDITION: the certificate is not
// valid at this time.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(
    const TlsFiles& files, absl::string_view flag);

// Plaintext without files. With them the CA is needed; cert and key are what the client presents to
// a server that asks for it. Errors as above.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeChannelCredentials(
    const TlsFiles& files, absl::string_view flag);

// For links where both sides present a certificate: all three files or none. INVALID_ARGUMENT names
// what is missing.
absl::Status CheckMutual(const TlsFiles& files, absl::string_view flag);

}  // namespace lockstep
