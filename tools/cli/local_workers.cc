// LocalWorkers: see local_workers.h.
#include "tools/cli/local_workers.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Validators.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace cli {
namespace {

constexpr absl::Duration kListenTimeout = absl::Seconds(60);
constexpr absl::Duration kStopTimeout = absl::Seconds(5);
constexpr absl::Duration kMonitorPeriod = absl::Milliseconds(5);

absl::StatusOr<std::string> MakeFolder() {
  std::string path = "/tmp/lockstep.XXXXXX";
  if (mkdtemp(path.data()) == nullptr) {
    return absl::InternalError(absl::StrCat("cannot make a folder like ", path));
  }
  return path;
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

// The processes, and the one thread that starts, watches and ends them: a child gets its signal of
// death when the thread that started it ends, so that thread must live as long as they do.
class LocalWorkers::Monitor {
 public:
  Monitor(LocalWorkersOptions options, std::string folder)
      : options_(std::move(options)), folder_(std::move(folder)) {}
  ~Monitor() {
    for (const std::string& file : files_) unlink(file.c_str());
    rmdir(folder_.c_str());
  }

  // Starts all of them and returns their addresses, or the first failure.
  absl::StatusOr<std::vector<std::string>> Start() {
    slots_.resize(static_cast<size_t>(options_.count + options_.spares));
    thread_ = std::thread([this] { Run(); });
    std::unique_lock<std::mutex> lock(mu_);
    changed_.wait(lock, [this] {
      return std::all_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
        return slot.state == State::kListening || slot.state == State::kFailed;
      });
    });
    std::vector<std::string> addresses;
    for (const Slot& slot : slots_) {
      RETURN_IF_ERROR(slot.failure);
      addresses.push_back(slot.address);
    }
    return addresses;
  }

  void SetSink(RankEventSink sink) {
    std::lock_guard<std::mutex> lock(mu_);
    sink_ = std::move(sink);
  }
  bool Watch(const std::string& address, int32_t link) {
    std::lock_guard<std::mutex> lock(mu_);
    Slot* slot = Find(address);
    if (slot == nullptr) return false;
    slot->link = link;
    return true;
  }
  bool Kill(const std::string& address) {
    std::lock_guard<std::mutex> lock(mu_);
    Slot* slot = Find(address);
    if (slot == nullptr) return false;
    slot->link = -1;
    slot->process.Signal(SIGKILL);
    return true;
  }
  bool Restart(const std::string& address, int32_t link) {
    std::lock_guard<std::mutex> lock(mu_);
    Slot* slot = Find(address);
    if (slot == nullptr) return false;
    slot->process.Signal(SIGKILL);
    slot->link = link;
    slot->state = State::kWanted;
    return true;
  }

  void Stop(absl::Duration timeout) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      stopping_ = true;
      sink_ = nullptr;
      for (Slot& slot : slots_) slot.process.Signal(SIGTERM);
      stop_deadline_ = absl::Now() + timeout;
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  enum class State {
    kWanted,    // to be started once the process before it is gone
    kStarting,  // until its address file is there
    kListening,
    kEnded,
    kFailed,
  };
  struct Slot {
    State state = State::kWanted;
    ChildProcess process;
    std::string address;
    std::string file;  // of the address
    absl::Time deadline;
    int32_t link = -1;  // -1: nobody asks
    absl::Status failure;
  };

  // Requires mu_.
  Slot* Find(const std::string& address) {
    for (Slot& slot : slots_) {
      if (slot.address == address) return &slot;
    }
    return nullptr;
  }

  void Run() {
    while (true) {
      {
        std::lock_guard<std::mutex> lock(mu_);
        bool left = false;
        for (size_t i = 0; i < slots_.size(); ++i) {
          if (!stopping_) Advance(i, &slots_[i]);
          if (stopping_ && absl::Now() >= stop_deadline_) slots_[i].process.Signal(SIGKILL);
          left = left || slots_[i].process.running();
        }
        if (stopping_ && !left) return;
      }
      absl::SleepFor(kMonitorPeriod);
    }
  }

  void Advance(size_t index, Slot* slot) {
    switch (slot->state) {
      case State::kWanted:
        if (!slot->process.running()) StartProcess(index, slot);
        break;
      case State::kStarting: {
        const absl::StatusOr<std::string> address =
            WaitForAddressFile(slot->file, &slot->process, absl::ZeroDuration());
        if (address.ok()) {
          slot->address = *address;
          slot->state = State::kListening;
          Report(slot, absl::OkStatus());
        } else if (!absl::IsDeadlineExceeded(address.status()) || absl::Now() >= slot->deadline) {
          Fail(slot, address.status());
        }
        break;
      }
      case State::kListening:
        if (!slot->process.running()) {
          slot->state = State::kEnded;
          ReportExit(slot);
        }
        break;
      case State::kEnded:
        // It may be watched only now.
        if (slot->link >= 0) ReportExit(slot);
        break;
      case State::kFailed:
        break;
    }
  }

  void StartProcess(size_t index, Slot* slot) {
    slot->file = absl::StrCat(folder_, "/worker-", index, ".", ++starts_);
    files_.push_back(slot->file);
    const int rank = static_cast<int>(index);
    std::vector<std::string> argv = {options_.binary, "--listen",
                                     "127.0.0.1:0",   "--address-file",
                                     slot->file,      "--parent-death",
                                     "--device",      DeviceOf(options_.device, rank),
                                     "--threads",     absl::StrCat(ThreadsPerWorker(options_)),
                                     "--log-level",   options_.log_level,
                                     "--log-format",  options_.log_format};
    argv.insert(argv.end(), options_.extra_flags.begin(), options_.extra_flags.end());
    ChildProcess::Options child;
    // A signal from the terminal goes to the server alone, which ends the workers after draining.
    child.own_process_group = true;
    absl::StatusOr<ChildProcess> process = ChildProcess::Start(argv, child);
    if (!process.ok()) return Fail(slot, process.status());
    slot->process = *std::move(process);
    slot->state = State::kStarting;
    slot->deadline = absl::Now() + kListenTimeout;
  }

  void Fail(Slot* slot, const absl::Status& status) {
    slot->state = State::kFailed;
    slot->failure = status;
    Report(slot, status);
  }
  void Report(Slot* slot, const absl::Status& status) {
    changed_.notify_all();
    if (slot->link < 0 || !sink_) return;
    RankEvent event;
    event.link = slot->link;
    event.kind = RankEvent::Kind::kProcessStarted;
    event.status = status;
    event.payload = ProcessStart{slot->address};
    sink_(std::move(event));
  }
  void ReportExit(Slot* slot) {
    if (slot->link < 0 || !sink_) return;
    RankEvent event;
    event.link = slot->link;
    event.kind = RankEvent::Kind::kProcessExited;
    ProcessExit exit;
    exit.outcome = slot->process.Outcome();
    // From outside come SIGKILL (an operator, or the kernel short of memory), SIGTERM and SIGINT.
    const int signal = slot->process.signal();
    exit.own_doing = signal != SIGKILL && signal != SIGTERM && signal != SIGINT;
    event.payload = std::move(exit);
    slot->link = -1;
    sink_(std::move(event));
  }

  const LocalWorkersOptions options_;
  const std::string folder_;  // of the address files
  std::thread thread_;
  std::mutex mu_;
  std::condition_variable changed_;
  // Guarded by mu_:
  std::vector<Slot> slots_;
  std::vector<std::string> files_;
  int64_t starts_ = 0;
  RankEventSink sink_;
  bool stopping_ = false;
  absl::Time stop_deadline_;
};

class LocalWorkers::Launcher : public WorkerLauncher {
 public:
  Launcher(Monitor* monitor, RankEventSink sink) : monitor_(monitor) {
    monitor_->SetSink(std::move(sink));
  }
  ~Launcher() override { monitor_->SetSink(nullptr); }
  bool Watch(const std::string& address, int32_t link) override {
    return monitor_->Watch(address, link);
  }
  bool Kill(const std::string& address) override { return monitor_->Kill(address); }
  bool Restart(const std::string& address, int32_t link) override {
    return monitor_->Restart(address, link);
  }

 private:
  Monitor* const monitor_;
};

LocalWorkers::LocalWorkers() = default;

absl::StatusOr<std::unique_ptr<LocalWorkers>> LocalWorkers::Start(
    const LocalWorkersOptions& options) {
  LocalWorkersOptions filled = options;
  if (filled.binary.empty()) {
    ASSIGN_OR_RETURN(filled.binary, FindWorkerBinary());
  }
  ASSIGN_OR_RETURN(const std::string folder, MakeFolder());
  std::unique_ptr<LocalWorkers> workers(new LocalWorkers());
  workers->monitor_ = std::make_unique<Monitor>(filled, folder);
  ASSIGN_OR_RETURN(std::vector<std::string> addresses, workers->monitor_->Start());
  const auto first_spare = addresses.begin() + options.count;
  workers->addresses_.assign(addresses.begin(), first_spare);
  workers->spares_.assign(first_spare, addresses.end());
  return workers;
}

LocalWorkers::~LocalWorkers() { Stop(kStopTimeout); }

std::unique_ptr<WorkerLauncher> LocalWorkers::MakeLauncher(RankEventSink sink) {
  return std::make_unique<Launcher>(monitor_.get(), std::move(sink));
}

void LocalWorkers::Stop(absl::Duration timeout) { monitor_->Stop(timeout); }

}  // namespace cli
}  // namespace lockstep
