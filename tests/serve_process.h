// A `lockstep serve` of the product: the server with local workers that it may start again. What a
// worker does wrong comes from //tests:fault_worker, which can stand in for the worker program.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "proto/admin.grpc.pb.h"
#include "proto/inference.grpc.pb.h"
#include "proto/model.grpc.pb.h"
#include "tools/process/child_process.h"

namespace lockstep {
namespace testing {

class ServeProcess {
 public:
  struct Options {
    std::string model;  // a directory
    int tp = 2;
    std::vector<std::string> flags;
    // Faults of each worker's process, by its number (ranks first, then spares): flags of
    // //tests:fault_worker. Empty: the worker of the product.
    std::vector<std::vector<std::string>> faults;
  };
  // Waits until the server is ready.
  static absl::StatusOr<std::unique_ptr<ServeProcess>> Start(const Options& options);

  inference::v1::InferenceService::Stub* inference() { return inference_.get(); }
  // Newest first.
  admin::v1::AdminService::Stub* admin() { return admin_.get(); }
  std::vector<admin::v1::FaultRecord> Faults();
  ChildProcess& process() { return process_; }
  std::string log() const;
  inference::v1::ServerStatus Status();
  // Also ends when the server has failed or ended.
  absl::Status WaitState(const std::string& state, absl::Duration timeout);
  int64_t Counter(const std::string& name) { return Status().counters().at(name); }

  // The process of the worker with this number; 0 when it does not run now.
  pid_t WorkerPid(int number) const;
  // SIGKILL; waits until that process is gone.
  void KillWorker(int number);

 private:
  ServeProcess() = default;

  ChildProcess process_;
  std::string log_;
  std::unique_ptr<inference::v1::InferenceService::Stub> inference_;
  std::unique_ptr<inference::v1::ModelService::Stub> models_;
  std::unique_ptr<admin::v1::AdminService::Stub> admin_;
};

}  // namespace testing
}  // namespace lockstep
