// The flags of a process that serves: shared by lockstep_coordinator and by the `coordinator` and
// `serve` verbs of the CLI.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "CLI/App.hpp"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/coordinator.h"
#include "coordinator/edge_flags.h"
#include "coordinator/serve_loop.h"

namespace lockstep {

// Values as parsed; Coordinator and Loop give the options.
class ServingFlags {
 public:
  // Adds the flags to `app`. `*this` must outlive the parsing.
  void AddTo(CLI::App* app);
  // Adds --workers, for programs whose workers run already.
  void AddWorkersTo(CLI::App* app);

  // INVALID_ARGUMENT names the flag that cannot be met. Without AddWorkersTo the caller fills in
  // `workers`.
  absl::StatusOr<CoordinatorOptions> Coordinator() const;
  ServeLoopOptions Loop() const;

  const std::string& model() const { return model_; }
  const std::string& log_level() const { return log_level_; }
  const std::string& log_format() const { return log_format_; }
  // Level and format of this process's log, as the coordinator's.
  void ApplyToLog() const;

 private:
  std::string model_;
  std::vector<std::string> workers_;
  std::vector<std::string> names_;
  std::string host_ = "127.0.0.1";
  int port_ = 50051;
  EdgeFlags edges_;
  std::string address_file_;
  std::string admin_address_file_;
  std::string metrics_address_file_;
  std::string notify_socket_;
  int64_t watchdog_usec_ = 0;
  int64_t watchdog_pid_ = 0;
  CapacityRequest capacity_;
  std::string activations_ = "bf16";
  std::string activation_quant_ = "none";
  bool no_prefix_cache_ = false;
  int64_t snapshot_interval_ = 1024;
  int64_t max_queued_requests_ = 1024;
  int64_t max_queued_tokens_ = int64_t{1} << 22;
  double shutdown_timeout_s_ = 30;
  double connect_timeout_s_ = 600;
  int64_t lease_ms_ = 3000;
  double step_timeout_s_ = 10;
  int recovery_budget_ = 20;
  std::string recovery_policy_ = "spare";
  bool share_devices_ = false;
  std::vector<std::string> spare_workers_;
  std::string state_dir_;
  double attach_grace_s_ = 30;
  std::string request_journal_;
  std::string journal_fsync_ = "50ms";
  double slow_consumer_timeout_s_ = 30;
  std::string log_level_ = "info";
  std::string log_format_ = "text";
};

}  // namespace lockstep
