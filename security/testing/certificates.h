// Certificates for tests, made when they are needed: nothing to expire in the repository.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "security/tls.h"

namespace lockstep {
namespace testing {

struct PemPair {
  std::string cert;
  std::string key;
};

class TestCa {
 public:
  explicit TestCa(const std::string& name);

  const std::string& cert() const { return own_.cert; }
  // A certificate for `names`, a list as OpenSSL writes it: "DNS:localhost,IP:127.0.0.1". Valid
  // from an hour ago until `valid` from now, which may be negative: expired.
  PemPair Issue(const std::string& names, absl::Duration valid = absl::Hours(1)) const;

 private:
  PemPair own_;
};

// Replaces a file by renaming.
void WriteFile(const std::string& path, const std::string& text);

// `stem`.cert, .key and .ca; the folder must exist. `ca` empty: none.
TlsFiles WriteTlsFiles(const std::string& stem, const PemPair& pair, const std::string& ca);

}  // namespace testing
}  // namespace lockstep
