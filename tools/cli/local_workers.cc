// LocalWorkers: see local_workers.h.
#include "tools/cli/local_workers.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Validators.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace cli {
namespace {

constexpr absl::Duration kListenTimeout = absl::Seconds(60);
constexpr absl::Duration kStopTimeout = absl::Seconds(5);

absl::StatusOr<std::string> MakeFolder() {
  std::string path = "/tmp/lockstep.XXXXXX";
  if (mkdtemp(path.data()) == nullptr) {
    return absl::InternalError(absl::StrCat("cannot make a folder like ", path));
  }
  return path;
}

std::string AddressFile(const std::string& folder, int rank) {
  return absl::StrCat(folder, "/worker-", rank);
}

int ThreadsPerWorker(const LocalWorkersOptions& options) {
  if (options.threads > 0) return options.threads;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, cores / options.count);
}

std::string DeviceOf(const std::string& device, int rank) {
  return device == "cuda" ? absl::StrCat("cuda:", rank) : device;
}

}  // namespace

void AddDeviceFlag(CLI::App* verb, LocalWorkersOptions* options) {
  verb->add_option("--device", options->device,
                   "Where the workers compute: cpu; cuda (rank r on GPU r); cuda:N (all on GPU N)")
      ->check([](const std::string& text) {
        const bool ordinal = text.size() > 5 && text.compare(0, 5, "cuda:") == 0 &&
                             text.find_first_not_of("0123456789", 5) == std::string::npos;
        if (text == "cpu" || text == "cuda" || ordinal) return std::string();
        return absl::StrCat(text, " is none of cpu, cuda, cuda:N");
      })
      ->capture_default_str();
}

absl::StatusOr<std::string> FindWorkerBinary() {
  const std::string folder = ExecutableFolder();
  const std::string candidates[] = {absl::StrCat(folder, "/lockstep_worker"),
                                    absl::StrCat(folder, "/../worker/lockstep_worker")};
  for (const std::string& candidate : candidates) {
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return absl::NotFoundError(
      absl::StrCat("no lockstep_worker program at ", absl::StrJoin(candidates, " or "),
                   "; build //worker:lockstep_worker or give --worker-binary"));
}

absl::StatusOr<std::unique_ptr<LocalWorkers>> LocalWorkers::Start(
    const LocalWorkersOptions& options) {
  std::string binary = options.binary;
  if (binary.empty()) {
    ASSIGN_OR_RETURN(binary, FindWorkerBinary());
  }
  std::unique_ptr<LocalWorkers> workers(new LocalWorkers());
  ASSIGN_OR_RETURN(workers->folder_, MakeFolder());
  for (int rank = 0; rank < options.count; ++rank) {
    ChildProcess::Options child;
    // A signal from the terminal goes to the server alone, which ends the workers after draining.
    child.own_process_group = true;
    ASSIGN_OR_RETURN(ChildProcess process,
                     ChildProcess::Start({binary, "--listen", "127.0.0.1:0", "--address-file",
                                          AddressFile(workers->folder_, rank), "--parent-death",
                                          "--device", DeviceOf(options.device, rank), "--threads",
                                          absl::StrCat(ThreadsPerWorker(options)), "--log-level",
                                          options.log_level, "--log-format", options.log_format},
                                         child));
    workers->processes_.push_back(std::move(process));
  }
  for (int rank = 0; rank < options.count; ++rank) {
    ASSIGN_OR_RETURN(
        std::string address,
        WaitForAddressFile(AddressFile(workers->folder_, rank),
                           &workers->processes_[static_cast<size_t>(rank)], kListenTimeout));
    workers->addresses_.push_back(std::move(address));
  }
  workers->RemoveFolder();
  return workers;
}

LocalWorkers::~LocalWorkers() {
  Stop(kStopTimeout);
  RemoveFolder();
}

void LocalWorkers::RemoveFolder() {
  if (folder_.empty()) return;
  for (size_t rank = 0; rank < processes_.size(); ++rank) {
    unlink(AddressFile(folder_, static_cast<int>(rank)).c_str());
  }
  rmdir(folder_.c_str());
  folder_.clear();
}

absl::Status LocalWorkers::Check() {
  for (size_t rank = 0; rank < processes_.size(); ++rank) {
    ChildProcess& process = processes_[rank];
    if (process.running()) continue;
    return absl::AbortedError(absl::StrCat("worker of rank ", rank, " (process ", process.pid(),
                                           ") ended with ", process.Outcome()));
  }
  return absl::OkStatus();
}

void LocalWorkers::Stop(absl::Duration timeout) {
  for (ChildProcess& process : processes_) process.Signal(SIGTERM);
  for (ChildProcess& process : processes_) {
    if (process.Wait(timeout)) continue;
    process.Signal(SIGKILL);
    process.Wait(timeout);
  }
}

}  // namespace cli
}  // namespace lockstep
