// TLS for gRPC servers and channels: see tls.h.
#include "security/tls.h"

#include <openssl/bio.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

using grpc::experimental::FileWatcherCertificateProvider;

template <typename T, void (*Free)(T*)>
struct Deleter {
  void operator()(T* object) const { Free(object); }
};
using Certificate = std::unique_ptr<X509, Deleter<X509, X509_free>>;
using PrivateKey = std::unique_ptr<EVP_PKEY, Deleter<EVP_PKEY, EVP_PKEY_free>>;
struct BioDeleter {
  void operator()(BIO* bio) const { BIO_free(bio); }
};

absl::StatusOr<std::string> ReadFile(const std::string& path, const std::string& flag) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (file) return text;
  return absl::NotFoundError(absl::StrCat(flag, " ", path, " cannot be read"));
}

std::unique_ptr<BIO, BioDeleter> Memory(const std::string& text) {
  return std::unique_ptr<BIO, BioDeleter>(
      BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// An encrypted key is not asked the password of: there may be no terminal.
int NoPassword(char*, int, int, void*) { return -1; }

// The first certificate of a file; its time of validity is checked.
absl::StatusOr<Certificate> LoadCertificate(const std::string& path, const std::string& flag) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, flag));
  Certificate certificate(PEM_read_bio_X509(Memory(text).get(), nullptr, NoPassword, nullptr));
  if (certificate == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " ", path, " has no certificate in PEM form"));
  }
  if (X509_cmp_current_time(X509_get0_notAfter(certificate.get())) < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(flag, " ", path, " has expired: renew the certificate"));
  }
  if (X509_cmp_current_time(X509_get0_notBefore(certificate.get())) > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(flag, " ", path, " is not valid yet: check the clock of this machine"));
  }
  return certificate;
}

absl::Status CheckPair(const TlsFiles& files, absl::string_view flag) {
  const std::string cert_flag = absl::StrCat(flag, "-cert");
  const std::string key_flag = absl::StrCat(flag, "-key");
  if (files.cert.empty() != files.key.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(cert_flag, " and ", key_flag, " belong together: give both, or none of them"));
  }
  if (files.cert.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const Certificate certificate, LoadCertificate(files.cert, cert_flag));
  ASSIGN_OR_RETURN(const std::string text, ReadFile(files.key, key_flag));
  const PrivateKey key(PEM_read_bio_PrivateKey(Memory(text).get(), nullptr, NoPassword, nullptr));
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(key_flag, " ", files.key, " has no private key in PEM form without password"));
  }
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    return absl::InvalidArgumentError(absl::StrCat(key_flag, " ", files.key,
                                                   " is not the key of the certificate in ",
                                                   cert_flag, " ", files.cert));
  }
  return absl::OkStatus();
}

absl::Status CheckCa(const TlsFiles& files, absl::string_view flag) {
  if (files.ca.empty()) return absl::OkStatus();
  return LoadCertificate(files.ca, absl::StrCat(flag, "-ca")).status();
}

std::shared_ptr<FileWatcherCertificateProvider> Watch(const TlsFiles& files) {
  return std::make_shared<FileWatcherCertificateProvider>(files.key, files.cert, files.ca,
                                                          kTlsReloadSeconds);
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(
    const TlsFiles& files, absl::string_view flag) {
  if (!files.any()) return grpc::InsecureServerCredentials();
  RETURN_IF_ERROR(CheckPair(files, flag));
  RETURN_IF_ERROR(CheckCa(files, flag));
  if (files.cert.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, "-ca asks clients for certificates; the server needs ", flag,
                     "-cert and ", flag, "-key of its own for that"));
  }
  grpc::experimental::TlsServerCredentialsOptions options(Watch(files));
  options.watch_identity_key_cert_pairs();
  if (files.ca.empty()) {
    options.set_cert_request_type(GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  } else {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(options);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeChannelCredentials(
    const TlsFiles& files, absl::string_view flag) {
  if (!files.any()) return grpc::InsecureChannelCredentials();
  RETURN_IF_ERROR(CheckPair(files, flag));
  RETURN_IF_ERROR(CheckCa(files, flag));
  if (files.ca.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, "-ca is missing: without it the server's certificate proves nothing"));
  }
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(Watch(files));
  options.watch_root_certs();
  if (!files.cert.empty()) options.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(options);
}

absl::Status CheckMutual(const TlsFiles& files, absl::string_view flag) {
  if (!files.any()) return absl::OkStatus();
  std::vector<std::string> missing;
  if (files.cert.empty()) missing.push_back(absl::StrCat(flag, "-cert"));
  if (files.key.empty()) missing.push_back(absl::StrCat(flag, "-key"));
  if (files.ca.empty()) missing.push_back(absl::StrCat(flag, "-ca"));
  if (missing.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("both sides of a worker link present a certificate; missing: ",
                   absl::StrJoin(missing, ", ")));
}

}  // namespace lockstep
