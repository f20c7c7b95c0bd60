// ChildProcess: one program that we start, watch and end. Move-only; the destructor ends the child
// (SIGKILL) and reaps it. Single thread per object.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace lockstep {

class ChildProcess {
 public:
  struct Options {
    std::string stdout_path;  // empty: the parent's stdout goes nowhere (/dev/null)
    std::string stderr_path;  // empty: the parent's stderr
    bool inherit_stdout = false;
    // The child gets SIGTERM when the thread that started it dies (Linux PR_SET_PDEATHSIG).
    bool die_with_parent = true;
    // The child leads a process group of its own, so that signals of the terminal do not reach it.
    bool own_process_group = false;
  };

  // NotFound when argv[0] is no executable file; Internal when the system refuses. Signals that the
  // parent blocks are not blocked in the child.
  static absl::StatusOr<ChildProcess> Start(const std::vector<std::string>& argv,
                                            const Options& options);
  ChildProcess() = default;
  ~ChildProcess();
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;

  pid_t pid() const { return pid_; }
  // False once it has ended (then Outcome says how).
  bool running();
  // Sends a signal; nothing when it has ended.
  void Signal(int signal);
  // Waits up to `timeout`. True when it has ended.
  bool Wait(absl::Duration timeout);
  // Exit code, or 128 + signal number. Only after the end.
  int exit_code() const { return exit_code_; }
  // That ended it; 0: none did.
  int signal() const { return signal_; }
  // "exit code 1", "signal 9 (Killed)", "running".
  std::string Outcome() const;

 private:
  void Record(int wait_status);

  pid_t pid_ = -1;
  bool ended_ = false;
  int exit_code_ = -1;
  int signal_ = 0;
};

// Waits until the file exists with a line in it and gives that line (a child wrote the address it
// listens on). Fails early, with the child's outcome, when the child ends first.
absl::StatusOr<std::string> WaitForAddressFile(const std::string& path, ChildProcess* child,
                                               absl::Duration timeout);

// The folder of the running executable.
std::string ExecutableFolder();

}  // namespace lockstep
