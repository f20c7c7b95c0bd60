// The life of a serving process: see serve_loop.h.
#include "coordinator/serve_loop.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/edge_options.h"
#include "coordinator/errors.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitCannotConnect = 3;
constexpr int kExitInterrupted = 130;
constexpr absl::Duration kPoll = absl::Milliseconds(50);
// A long load is no failed start: the service manager is told each third of this.
constexpr absl::Duration kStartExtension = absl::Seconds(30);

sigset_t StopSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

// The signal that arrived within `wait`, or 0.
int WaitForSignal(absl::Duration wait) {
  const sigset_t set = StopSignals();
  const timespec timeout = absl::ToTimespec(wait);
  const int signal = sigtimedwait(&set, nullptr, &timeout);
  return signal > 0 ? signal : 0;
}

int ExitCodeOf(int signal) { return signal == SIGINT ? kExitInterrupted : 0; }
// Of a signal that cut running requests short.
int AbortedExitCode(int signal) { return signal == SIGINT ? kExitInterrupted : kExitFailed; }

// Written beside and renamed, so that a reader never sees a part of it.
absl::Status WriteAddress(absl::string_view flag, const std::string& path,
                          const std::string& address) {
  if (path.empty()) return absl::OkStatus();
  const std::string beside = absl::StrCat(path, ".new");
  {
    std::ofstream file(beside);
    file << address << "\n";
  }
  if (rename(beside.c_str(), path.c_str()) == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("cannot write ", flag, " ", path));
}

absl::Status WriteAddresses(const Coordinator& coordinator, const CoordinatorOptions& options,
                            const ServeLoopOptions& loop) {
  RETURN_IF_ERROR(WriteAddress("--address-file", loop.address_file, coordinator.address()));
  const EdgeOptions& edges = options.edges;
  if (coordinator.admin_port() > 0) {
    RETURN_IF_ERROR(WriteAddress("--admin-address-file", loop.admin_address_file,
                                 absl::StrCat(edges.admin_host, ":", coordinator.admin_port())));
  }
  if (coordinator.metrics_port() > 0) {
    RETURN_IF_ERROR(
        WriteAddress("--metrics-address-file", loop.metrics_address_file,
                     absl::StrCat(edges.metrics_host, ":", coordinator.metrics_port())));
  }
  return absl::OkStatus();
}

// What is done at every poll, whatever the server does.
void Tell(const Coordinator& coordinator, ServiceNotifier* notifier) {
  const absl::Time now = absl::Now();
  if (coordinator.Alive()) notifier->Alive(now);
  notifier->Status(coordinator.StatusLine(), now);
  FlushRepeatedLogs();
}

// What a signal or a failure ended; `signal` 0 means `failure`.
struct Ending {
  int signal = 0;
  absl::Status failure;
};

// Waits for a signal or a failed load.
Ending Serve(Coordinator* coordinator, ServiceNotifier* notifier) {
  std::atomic<bool> load_ended{false};
  absl::Status load_status;
  std::thread loader([&]() {
    load_status = coordinator->Load();
    load_ended = true;
  });
  Ending ending;
  bool announced = false;
  absl::Time extend_at = absl::InfinitePast();
  while (ending.signal == 0 && ending.failure.ok()) {
    ending.signal = WaitForSignal(kPoll);
    if (ending.signal != 0) break;
    Tell(*coordinator, notifier);
    if (!load_ended && absl::Now() >= extend_at) {
      notifier->ExtendStart(kStartExtension);
      extend_at = absl::Now() + kStartExtension / 3;
    }
    if (!load_ended) continue;
    if (!announced && load_status.ok()) {
      fputs(coordinator->Describe().c_str(), stderr);
      notifier->Ready();
    }
    announced = true;
    ending.failure = load_status;
  }
  if (!load_ended) {
    // Nothing was accepted yet, and a load cannot be interrupted: the process ends with it.
    coordinator->EndCalls();
    if (ending.failure.ok()) {
      LogInfo("stopped while loading");
      _Exit(ExitCodeOf(ending.signal));
    }
    LogError("while loading: ", ending.failure.message());
    _Exit(kExitFailed);
  }
  loader.join();
  return ending;
}

// Lets running requests finish. The signal that ended this early, or 0. An error when the workers
// could not be brought together any more, now or before: requests were lost.
absl::StatusOr<int> DrainFor(Coordinator* coordinator, absl::Duration timeout,
                             ServiceNotifier* notifier) {
  coordinator->Drain();
  LogInfo("draining: running requests have ", absl::FormatDuration(timeout), " to finish");
  const absl::Time deadline = absl::Now() + timeout;
  while (!coordinator->Idle()) {
    Tell(*coordinator, notifier);
    if (absl::Now() >= deadline) {
      LogWarning("the shutdown timeout is over: requests that still run are ended");
      break;
    }
    if (const int signal = WaitForSignal(kPoll); signal != 0) {
      LogWarning("second signal: requests that still run are ended");
      return signal;
    }
  }
  RETURN_IF_ERROR(coordinator->Healthy());
  return 0;
}

// Ends what runs, each call with a status. One more signal ends the process at once.
void Stop(Coordinator* coordinator) {
  std::atomic<bool> stopped{false};
  std::thread stopper([&]() {
    coordinator->Stop();
    stopped = true;
  });
  while (!stopped) {
    if (const int signal = WaitForSignal(kPoll); signal != 0) {
      LogWarning("signal while stopping: ending at once");
      _Exit(AbortedExitCode(signal));
    }
  }
  stopper.join();
}

}  // namespace

void BlockStopSignals() {
  const sigset_t set = StopSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

int RunServer(const CoordinatorOptions& coordinator_options, const ServeLoopOptions& options) {
  auto coordinator = Coordinator::Start(coordinator_options);
  if (!coordinator.ok()) {
    LogError(coordinator.status().message());
    return kExitFailed;
  }
  const std::string address = (*coordinator)->address();
  LogInfo("listening on ", address, ", loading ", coordinator_options.model_path);
  if (const absl::Status written = WriteAddresses(**coordinator, coordinator_options, options);
      !written.ok()) {
    LogError(written.message());
    return kExitFailed;
  }
  ServiceNotifier notifier(options.notify);
  const Ending ending = Serve(coordinator->get(), &notifier);
  notifier.Stopping();
  int exit_code = kExitFailed;
  if (ending.signal != 0) {
    const absl::StatusOr<int> drained =
        DrainFor(coordinator->get(), options.shutdown_timeout, &notifier);
    if (!drained.ok()) {
      LogError(drained.status().message());
    } else {
      exit_code = *drained == 0 ? ExitCodeOf(ending.signal) : AbortedExitCode(*drained);
    }
  } else {
    LogError(ending.failure.message());
    if (ReasonOf(ending.failure) == "WORKER_UNREACHABLE") exit_code = kExitCannotConnect;
  }
  Stop(coordinator->get());
  LogInfo("stopped");
  return exit_code;
}

}  // namespace lockstep
