// Certificates for tests: see certificates.h.
#include "security/testing/certificates.h"

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>

#include <atomic>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace lockstep {
namespace testing {
namespace {

constexpr absl::Duration kBegan = absl::Hours(1);

// A test has no use for going on after one of these.
void Require(bool ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "OpenSSL failed: %s\n", what);
  abort();
}

template <typename Write>
std::string ToPem(const Write& write) {
  BIO* bio = BIO_new(BIO_s_mem());
  Require(write(bio) == 1, "writing PEM");
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  std::string text(data, static_cast<size_t>(size));
  BIO_free(bio);
  return text;
}

X509* ReadCert(const std::string& pem) {
  BIO* bio = BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size()));
  X509* cert = PEM_read_bio_X509(bio, nullptr, nullptr, nullptr);
  BIO_free(bio);
  Require(cert != nullptr, "reading a certificate");
  return cert;
}

EVP_PKEY* ReadKey(const std::string& pem) {
  BIO* bio = BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size()));
  EVP_PKEY* key = PEM_read_bio_PrivateKey(bio, nullptr, nullptr, nullptr);
  BIO_free(bio);
  Require(key != nullptr, "reading a key");
  return key;
}

void AddExtension(X509* cert, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, cert, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  Require(extension != nullptr, value.c_str());
  Require(X509_add_ext(cert, extension, -1) == 1, "adding an extension");
  X509_EXTENSION_free(extension);
}

// Signed by `issuer`, or by itself without one.
PemPair Make(const std::string& common_name, const std::string& names, absl::Duration valid,
             const PemPair* issuer) {
  static std::atomic<long> serial{1};
  EVP_PKEY* key = EVP_EC_gen("P-256");
  Require(key != nullptr, "making a key");
  X509* cert = X509_new();
  X509* signer = issuer == nullptr ? cert : ReadCert(issuer->cert);
  EVP_PKEY* signing_key = issuer == nullptr ? key : ReadKey(issuer->key);
  X509_set_version(cert, X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(cert), serial++);
  X509_gmtime_adj(X509_getm_notBefore(cert), -absl::ToInt64Seconds(kBegan));
  X509_gmtime_adj(X509_getm_notAfter(cert), absl::ToInt64Seconds(valid));
  X509_set_pubkey(cert, key);
  X509_NAME* subject = X509_get_subject_name(cert);
  X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(common_name.c_str()), -1, -1,
                             0);
  X509_set_issuer_name(cert, X509_get_subject_name(signer));
  AddExtension(cert, signer, NID_basic_constraints,
               issuer == nullptr ? "critical,CA:TRUE" : "critical,CA:FALSE");
  if (!names.empty()) AddExtension(cert, signer, NID_subject_alt_name, names);
  Require(X509_sign(cert, signing_key, EVP_sha256()) > 0, "signing");
  PemPair pair;
  pair.cert = ToPem([cert](BIO* bio) { return PEM_write_bio_X509(bio, cert); });
  pair.key = ToPem([key](BIO* bio) {
    return PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr);
  });
  if (signer != cert) X509_free(signer);
  if (signing_key != key) EVP_PKEY_free(signing_key);
  X509_free(cert);
  EVP_PKEY_free(key);
  return pair;
}

}  // namespace

TestCa::TestCa(const std::string& name) : own_(Make(name, "", absl::Hours(1), nullptr)) {}

PemPair TestCa::Issue(const std::string& names, absl::Duration valid) const {
  return Make("lockstep test", names, valid, &own_);
}

void WriteFile(const std::string& path, const std::string& text) {
  const std::string beside = absl::StrCat(path, ".new");
  {
    std::ofstream file(beside, std::ios::binary);
    file << text;
  }
  Require(rename(beside.c_str(), path.c_str()) == 0, path.c_str());
}

TlsFiles WriteTlsFiles(const std::string& stem, const PemPair& pair, const std::string& ca) {
  TlsFiles files;
  files.cert = absl::StrCat(stem, ".cert");
  files.key = absl::StrCat(stem, ".key");
  WriteFile(files.cert, pair.cert);
  WriteFile(files.key, pair.key);
  if (!ca.empty()) {
    files.ca = absl::StrCat(stem, ".ca");
    WriteFile(files.ca, ca);
  }
  return files;
}

}  // namespace testing
}  // namespace lockstep
