// AdminBackend: what the admin service needs from the process that serves. The coordinator is the
// real one; tests use a fake.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/engine.h"
#include "coordinator/serving_backend.h"
#include "proto/admin.pb.h"
#include "proto/model.pb.h"

namespace lockstep {

// Thread safe. Errors have the reasons that proto/admin.proto names.
class AdminBackend {
 public:
  virtual ~AdminBackend() = default;

  // Everything but log_level.
  virtual admin::v1::GetServerInfoResponse ServerInfo() const = 0;
  virtual inference::v1::ServerStatus Status() const = 0;

  virtual absl::Status DrainRequests() = 0;
  virtual absl::Status UndrainRequests() = 0;
  // OK when new requests are taken.
  virtual absl::Status Ready() const = 0;

  virtual absl::StatusOr<std::vector<RequestInfo>> ListRequests() = 0;
  virtual CancelResult Cancel(const std::string& request_id, const absl::Status& status) = 0;
  virtual absl::StatusOr<int64_t> ResetPrefixCache() = 0;

  // Newest first.
  virtual std::vector<admin::v1::FaultRecord> Faults() const = 0;
  // Begins the replacement. The rank exists.
  virtual absl::Status ReplaceWorker(int rank, const std::string& reason) = 0;
};

}  // namespace lockstep
