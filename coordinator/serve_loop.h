// The life of a serving process: load, serve, drain on a signal, end. Used by lockstep_coordinator
// and by the CLI.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "coordinator/coordinator.h"
#include "coordinator/service_notifier.h"

namespace lockstep {

struct ServeLoopOptions {
  absl::Duration shutdown_timeout = absl::Seconds(30);
  // Each gets "host:port" (the first one "unix:/path" where that is) once the server listens;
  // empty: none.
  std::string address_file;
  std::string admin_address_file;
  std::string metrics_address_file;
  NotifyOptions notify;
};

// Blocks SIGTERM and SIGINT for this thread and all that it starts; RunServer takes them. Call
// first in main, before any thread exists.
void BlockStopSignals();

// Serves until SIGTERM or SIGINT. Then new requests are refused and running ones get up to
// shutdown_timeout to finish; after that, or at a second signal, they end with UNAVAILABLE; a third
// signal ends the process at once. Returns the exit code: 0 after SIGTERM, 130 after SIGINT, 1 when
// a second SIGTERM cut requests short, when loading failed or the workers had been given up, 3 when
// a worker could not be reached (the cause is on stderr).
int RunServer(const CoordinatorOptions& coordinator, const ServeLoopOptions& options);

}  // namespace lockstep
