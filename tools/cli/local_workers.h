// LocalWorkers: the worker processes of one machine. Workers are their own program, so the CLI
// needs none of their code.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "CLI/App.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tools/process/child_process.h"

namespace lockstep {
namespace cli {

// The lockstep_worker program: beside this executable, or in ../worker as the build leaves it.
// NotFound says where it was looked for.
absl::StatusOr<std::string> FindWorkerBinary();

struct LocalWorkersOptions {
  std::string binary;  // empty: FindWorkerBinary
  int count = 1;
  // "cpu"; "cuda": rank r on GPU r; "cuda:N": every rank on GPU N.
  std::string device = "cpu";
  int threads = 0;  // per worker; 0: cores / count, at least 1
  std::string log_level = "info";
  std::string log_format = "text";
};

// The --device flag of the verbs that start workers.
void AddDeviceFlag(CLI::App* verb, LocalWorkersOptions* options);

class LocalWorkers {
 public:
  // Starts `count` workers on free ports of 127.0.0.1 and waits until they listen. They end with
  // the thread that called this.
  static absl::StatusOr<std::unique_ptr<LocalWorkers>> Start(const LocalWorkersOptions& options);
  ~LocalWorkers();

  const std::vector<std::string>& addresses() const { return addresses_; }

  // An error naming the first worker that has ended, and how.
  absl::Status Check();

  // SIGTERM, then SIGKILL for what is left after `timeout`.
  void Stop(absl::Duration timeout);

 private:
  LocalWorkers() = default;
  void RemoveFolder();

  std::string folder_;  // of the address files, while they are needed
  std::vector<ChildProcess> processes_;
  std::vector<std::string> addresses_;
};

}  // namespace cli
}  // namespace lockstep
