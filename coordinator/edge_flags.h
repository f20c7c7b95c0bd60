// The flags behind EdgeOptions, and the rule that no port is open to other machines in plaintext
// unless that is said.
#pragma once

#include <string>

#include "CLI/App.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/edge_options.h"

namespace lockstep {

// True for addresses that only this machine can reach.
bool IsLoopback(const std::string& host);

class EdgeFlags {
 public:
  // Adds the flags to `app`, which must outlive this object. `*this` must outlive the parsing.
  void AddTo(CLI::App* app);
  // Adds --worker-tls-*, for programs whose workers are not their children.
  void AddWorkerTlsTo(CLI::App* app);

  // INVALID_ARGUMENT names the flag that cannot be met. `host` is the public one.
  absl::StatusOr<EdgeOptions> Options(const std::string& host) const;

 private:
  // An error when `host` is open to other machines and nothing encrypts.
  absl::Status CheckReach(const std::string& flag, const std::string& host, bool encrypted) const;

  const CLI::App* app_ = nullptr;
  bool insecure_listen_ = false;
  EdgeOptions options_;
};

}  // namespace lockstep
