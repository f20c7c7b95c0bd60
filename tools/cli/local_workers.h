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
#include "coordinator/group/rank_link.h"
#include "tools/process/child_process.h"

namespace lockstep {
namespace cli {

// The lockstep_worker program: beside this executable, or in ../worker as the build leaves it.
// NotFound says where it was looked for.
absl::StatusOr<std::string> FindWorkerBinary();

struct LocalWorkersOptions {
  std::string binary;  // empty: FindWorkerBinary
  int count = 1;
  int spares = 0;  // more workers, which wait
  // "cpu"; "cuda": rank r on GPU r; "cuda:N": every rank on GPU N.
  std::string device = "cpu";
  int threads = 0;  // per worker; 0: cores / count, at least 1
  std::string log_level = "info";
  std::string log_format = "text";
  std::vector<std::string> extra_flags;  // of the worker program
};

// The --device flag of the verbs that start workers.
void AddDeviceFlag(CLI::App* verb, LocalWorkersOptions* options);

// Starts workers, watches them, and starts others in place of those that a group gives up.
class LocalWorkers {
 public:
  // Starts the workers on free ports of 127.0.0.1 and waits until they listen. They end with the
  // process.
  static absl::StatusOr<std::unique_ptr<LocalWorkers>> Start(const LocalWorkersOptions& options);
  // Stop.
  ~LocalWorkers();

  // As they were at the start.
  const std::vector<std::string>& addresses() const { return addresses_; }
  const std::vector<std::string>& spares() const { return spares_; }

  // What a WorkerGroup needs to watch, end and restart them. `*this` outlives it.
  std::unique_ptr<WorkerLauncher> MakeLauncher(RankEventSink sink);

  // SIGTERM, then SIGKILL for what is left after `timeout`. Nothing is restarted any more.
  void Stop(absl::Duration timeout);

 private:
  class Monitor;
  class Launcher;
  LocalWorkers();

  std::unique_ptr<Monitor> monitor_;
  std::vector<std::string> addresses_;
  std::vector<std::string> spares_;
};

}  // namespace cli
}  // namespace lockstep
