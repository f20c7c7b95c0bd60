// HealthServiceImpl: the standard health protocol (grpc.health.v1) of the public server. A Watch
// tells changes only, and ends when the server does: the library's own service repeats states and
// holds a server that shuts down until the last Watch is cut off.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/grpcpp.h"
#include "proto/health.grpc.pb.h"

namespace lockstep {

namespace internal {
// Both methods take their request as bytes (see rpc_util.h).
using RawHealth = grpc::health::v1::Health;
using HealthServiceBase = RawHealth::WithRawCallbackMethod_Check<
    RawHealth::WithRawCallbackMethod_Watch<RawHealth::Service>>;
}  // namespace internal

// Thread safe.
class HealthServiceImpl final : public internal::HealthServiceBase {
 public:
  // A name that was never set is NOT_FOUND to Check and SERVICE_UNKNOWN to Watch.
  void Set(const std::string& name, bool serving);
  // Every name is NOT_SERVING from now on; every Watch tells so and ends, UNAVAILABLE DRAINING.
  void Shutdown();

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Watch(grpc::CallbackServerContext* context,
                                                    const grpc::ByteBuffer* request) override;

 private:
  class Watcher;
  using State = grpc::health::v1::HealthCheckResponse::ServingStatus;

  State StateOf(const std::string& name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Lets the watchers see what has changed.
  void TellWatchers() ABSL_LOCKS_EXCLUDED(mutex_);

  mutable absl::Mutex mutex_;
  std::map<std::string, State> states_ ABSL_GUARDED_BY(mutex_);
  std::set<std::shared_ptr<Watcher>> watchers_ ABSL_GUARDED_BY(mutex_);  // until their OnDone
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace lockstep
