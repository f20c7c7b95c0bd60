// What a coordinator opens to the outside besides its public port, and what guards its ports. Plain
// values, filled from flags (edge_flags.h).
#pragma once

#include <map>
#include <string>

#include "security/tls.h"

namespace lockstep {

struct EdgeOptions {
  // ---- the public port ----
  std::string unix_socket;  // a path: listen there instead of on host and port
  TlsFiles tls;             // of the public and the admin port; empty: plaintext
  std::string token_file;   // of the public port; empty: no tokens

  // ---- the links to the workers ----
  TlsFiles worker_tls;  // all three or none

  // ---- the admin port ----
  int admin_port = -1;  // -1: none; 0: any free one
  std::string admin_host = "127.0.0.1";
  std::string admin_token_file;

  // ---- the metrics endpoint; always plaintext ----
  int metrics_port = -1;  // -1: none; 0: any free one
  std::string metrics_host = "127.0.0.1";

  // Every flag with the value in effect, for GetServerInfo. Secrets are in files, never in flags.
  std::map<std::string, std::string> flags;
};

}  // namespace lockstep
