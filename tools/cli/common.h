// What the verbs of the CLI share: exit codes, the flags of a client, and how errors are told.
// stdout is data, stderr is talk.
#pragma once

#include <memory>
#include <string>

#include "CLI/App.hpp"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "security/tls.h"

namespace lockstep {
namespace cli {

enum ExitCode : int {
  kExitOk = 0,
  kExitFailed = 1,
  kExitUsage = 2,
  kExitCannotConnect = 3,
  kExitNotReady = 4,
  kExitCheckFailed = 5,
  kExitInterrupted = 130,
};

// The help text that explains them.
extern const char kExitCodesHelp[];

// A line on stderr.
void Talk(const std::string& line);

// Flags of every verb that talks to a server.
struct ClientFlags {
  std::string address = "127.0.0.1:50051";
  double connect_timeout_s = 5;
  double timeout_s = 0;  // of a call; 0: none
  TlsFiles tls;
  std::string token_file;

  void AddTo(CLI::App* app);
  // A channel that is connected; nullptr after telling why not (exit code kExitCannotConnect).
  std::shared_ptr<grpc::Channel> Connect() const;
  // Applies timeout_s.
  void Prepare(grpc::ClientContext* context) const;
};

// Tells a failed call with its code, reason and field, and gives the exit code for it.
int TellFailure(const grpc::Status& status);

// The ErrorInfo reason in the details of `status`, or "".
std::string ReasonOf(const grpc::Status& status);

// The whole of stdin.
std::string ReadStdin();

}  // namespace cli
}  // namespace lockstep
