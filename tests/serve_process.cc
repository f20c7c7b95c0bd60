#include "tests/serve_process.h"

#include <dirent.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "tests/cluster.h"

namespace lockstep {
namespace testing {
namespace {

constexpr char kLockstep[] = "tools/lockstep";
constexpr char kWorker[] = "worker/lockstep_worker";
constexpr char kFaultWorker[] = "tests/fault_worker";

// A program that is the fault worker with the flags of the worker that it is to be: the file of its
// address says which.
std::string FaultScript(const std::vector<std::vector<std::string>>& faults) {
  const std::string path = TempPath("fault-worker");
  std::ofstream script(path);
  script << "#!/bin/sh\ncase \"$*\" in\n";
  for (size_t i = 0; i < faults.size(); ++i) {
    script << "*/worker-" << i << ".*) exec " << kFaultWorker << " \"$@\" "
           << absl::StrJoin(faults[i], " ") << " ;;\n";
  }
  script << "*) exec " << kFaultWorker << " \"$@\" ;;\nesac\n";
  script.close();
  CHECK_EQ(chmod(path.c_str(), 0755), 0);
  return path;
}

std::string FileOf(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServeProcess>> ServeProcess::Start(const Options& options) {
  auto serve = std::unique_ptr<ServeProcess>(new ServeProcess());
  const std::string file = TempPath("serve-address");
  serve->log_ = TempPath("serve-log");
  std::vector<std::string> argv = {kLockstep,
                                   "serve",
                                   "--model",
                                   options.model,
                                   "--tp",
                                   absl::StrCat(options.tp),
                                   "--port",
                                   "0",
                                   "--address-file",
                                   file,
                                   "--admin-port",
                                   "0",
                                   "--admin-address-file",
                                   file + ".admin",
                                   "--worker-threads",
                                   "1",
                                   "--worker-binary",
                                   options.faults.empty() ? kWorker : FaultScript(options.faults)};
  const std::string flags = absl::StrJoin(options.flags, " ");
  if (!absl::StrContains(flags, "--lease-ms")) argv.insert(argv.end(), {"--lease-ms", "10000"});
  argv.insert(argv.end(), options.flags.begin(), options.flags.end());
  ChildProcess::Options process;
  process.stderr_path = serve->log_;
  ASSIGN_OR_RETURN(serve->process_, ChildProcess::Start(argv, process));
  auto address = WaitForAddressFile(file, &serve->process_, absl::Seconds(60));
  if (!address.ok()) {
    return absl::Status(address.status().code(),
                        absl::StrCat(address.status().message(), "\n", serve->log()));
  }
  const auto channel = grpc::CreateChannel(*address, grpc::InsecureChannelCredentials());
  serve->inference_ = inference::v1::InferenceService::NewStub(channel);
  serve->models_ = inference::v1::ModelService::NewStub(channel);
  ASSIGN_OR_RETURN(const std::string admin,
                   WaitForAddressFile(file + ".admin", &serve->process_, absl::Seconds(60)));
  serve->admin_ = admin::v1::AdminService::NewStub(
      grpc::CreateChannel(admin, grpc::InsecureChannelCredentials()));
  RETURN_IF_ERROR(serve->WaitState("READY", absl::Seconds(120)));
  return serve;
}

std::string ServeProcess::log() const { return ReadFile(log_); }

inference::v1::ServerStatus ServeProcess::Status() {
  grpc::ClientContext context;
  inference::v1::ServerStatus status;
  const grpc::Status called = models_->GetServerStatus(&context, {}, &status);
  if (!called.ok()) status.set_state(absl::StrCat("no answer: ", called.error_message()));
  return status;
}

std::vector<admin::v1::FaultRecord> ServeProcess::Faults() {
  grpc::ClientContext context;
  admin::v1::ListFaultsResponse response;
  const grpc::Status called = admin_->ListFaults(&context, {}, &response);
  EXPECT_TRUE(called.ok()) << called.error_message();
  return {response.faults().begin(), response.faults().end()};
}

absl::Status ServeProcess::WaitState(const std::string& state, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  inference::v1::ServerStatus now = Status();
  while (now.state() != state) {
    if (absl::Now() >= deadline || !process_.running() || now.state() == "FAILED") {
      return absl::DeadlineExceededError(absl::StrCat(
          "the server is ", now.state(), ", not ", state, ": ", now.state_detail(), "\n", log()));
    }
    absl::SleepFor(absl::Milliseconds(20));
    now = Status();
  }
  return absl::OkStatus();
}

pid_t ServeProcess::WorkerPid(int number) const {
  const std::string mark = absl::StrCat("/worker-", number, ".");
  DIR* proc = opendir("/proc");
  CHECK(proc != nullptr);
  pid_t found = 0;
  while (const dirent* entry = readdir(proc)) {
    int64_t pid = 0;
    if (!absl::SimpleAtoi(entry->d_name, &pid)) continue;
    const std::string folder = absl::StrCat("/proc/", pid);
    if (!absl::StrContains(FileOf(folder + "/cmdline"), mark)) continue;
    // The parent is the fourth word of stat, behind the name in parentheses.
    const std::string stat = FileOf(folder + "/stat");
    const size_t name_end = stat.rfind(')');
    if (name_end == std::string::npos) continue;
    std::istringstream words(stat.substr(name_end + 1));
    std::string state;
    int64_t parent = 0;
    words >> state >> parent;
    if (parent == process_.pid() && state != "Z") found = static_cast<pid_t>(pid);
  }
  closedir(proc);
  return found;
}

void ServeProcess::KillWorker(int number) {
  const pid_t pid = WorkerPid(number);
  ASSERT_NE(pid, 0) << "no worker " << number;
  ASSERT_EQ(kill(pid, SIGKILL), 0);
  while (WorkerPid(number) == pid) absl::SleepFor(absl::Milliseconds(2));
}

}  // namespace testing
}  // namespace lockstep
