#include "tools/process/child_process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace lockstep {
namespace {

void Redirect(const std::string& path, int fd) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file >= 0) dup2(file, fd);
}

}  // namespace

absl::StatusOr<ChildProcess> ChildProcess::Start(const std::vector<std::string>& argv,
                                                 const Options& options) {
  if (argv.empty() || access(argv[0].c_str(), X_OK) != 0) {
    return absl::NotFoundError(
        absl::StrCat("cannot run ", argv.empty() ? "nothing" : argv[0], ": ", strerror(errno)));
  }
  std::vector<char*> args;
  for (const std::string& a : argv) args.push_back(const_cast<char*>(a.c_str()));
  args.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return absl::InternalError(absl::StrCat("fork: ", strerror(errno)));
  if (pid == 0) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    if (options.own_process_group) setpgid(0, 0);
    if (options.die_with_parent) {
      prctl(PR_SET_PDEATHSIG, SIGTERM);
      if (getppid() != parent) _exit(127);
    }
    if (!options.inherit_stdout) {
      Redirect(options.stdout_path.empty() ? "/dev/null" : options.stdout_path, STDOUT_FILENO);
    }
    if (!options.stderr_path.empty()) Redirect(options.stderr_path, STDERR_FILENO);
    execv(args[0], args.data());
    _exit(127);
  }
  ChildProcess child;
  child.pid_ = pid;
  return child;
}

ChildProcess::~ChildProcess() {
  if (pid_ > 0 && !ended_) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      ended_(other.ended_),
      exit_code_(other.exit_code_),
      signal_(other.signal_) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(ended_, other.ended_);
  std::swap(exit_code_, other.exit_code_);
  std::swap(signal_, other.signal_);
  return *this;
}

void ChildProcess::Record(int wait_status) {
  ended_ = true;
  if (WIFSIGNALED(wait_status)) {
    signal_ = WTERMSIG(wait_status);
    exit_code_ = 128 + signal_;
  } else {
    exit_code_ = WEXITSTATUS(wait_status);
  }
}

bool ChildProcess::running() {
  if (pid_ <= 0 || ended_) return false;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) == pid_) Record(status);
  return !ended_;
}

void ChildProcess::Signal(int signal) {
  if (running()) kill(pid_, signal);
}

bool ChildProcess::Wait(absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  while (running()) {
    if (absl::Now() >= end) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return true;
}

std::string ChildProcess::Outcome() const {
  if (!ended_) return "running";
  if (signal_ != 0) return absl::StrCat("signal ", signal_, " (", strsignal(signal_), ")");
  return absl::StrCat("exit code ", exit_code_);
}

absl::StatusOr<std::string> WaitForAddressFile(const std::string& path, ChildProcess* child,
                                               absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  for (;;) {
    std::ifstream file(path);
    std::string line;
    if (std::getline(file, line) && !line.empty()) return line;
    if (!child->running()) {
      return absl::UnavailableError(
          absl::StrCat("process ", child->pid(), " ended before it listened: ", child->Outcome()));
    }
    if (absl::Now() >= end) {
      return absl::DeadlineExceededError(absl::StrCat(
          "process ", child->pid(), " did not listen within ", absl::FormatDuration(timeout)));
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
}

std::string ExecutableFolder() {
  char path[4096];
  const ssize_t n = readlink("/proc/self/exe", path, sizeof path);
  const std::string full(path, n > 0 ? static_cast<size_t>(n) : 0);
  const size_t slash = full.rfind('/');
  return slash == std::string::npos ? "." : full.substr(0, slash);
}

}  // namespace lockstep
