// What the verbs of the CLI share: see common.h.
#include "tools/cli/common.h"

#include <stdio.h>

#include <iostream>
#include <iterator>
#include <utility>
#include <vector>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Validators.hpp"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/error_details.pb.h"
#include "security/token_file.h"

namespace lockstep {
namespace cli {
namespace {

constexpr int kMaxMessageBytes = 64 << 20;
constexpr int kKeepaliveMs = 30 * 1000;
constexpr int kKeepaliveTimeoutMs = 10 * 1000;

using grpc::experimental::ClientInterceptorFactoryInterface;

// Adds the token to every call of a channel, plaintext ones too: the library's own call credentials
// refuse these.
class TokenSender : public grpc::experimental::Interceptor {
 public:
  explicit TokenSender(const std::string& token) : token_(token) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            grpc::experimental::InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->insert({"authorization", absl::StrCat("Bearer ", token_)});
    }
    methods->Proceed();
  }

 private:
  const std::string token_;
};

class TokenSenderFactory : public ClientInterceptorFactoryInterface {
 public:
  explicit TokenSenderFactory(const std::string& token) : token_(token) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(
      grpc::experimental::ClientRpcInfo*) override {
    return new TokenSender(token_);
  }

 private:
  const std::string token_;
};

template <typename Detail>
bool FindDetail(const grpc::Status& status, Detail* detail) {
  google::rpc::Status wire;
  if (!wire.ParseFromString(status.error_details())) return false;
  for (const auto& any : wire.details()) {
    if (any.UnpackTo(detail)) return true;
  }
  return false;
}

}  // namespace

const char kExitCodesHelp[] =
    "Exit codes: 0 ok, 1 failed, 2 wrong usage, 3 cannot connect (a client to its server, a "
    "coordinator to its workers), 4 server not ready, 5 check failed, 130 interrupted.";

void Talk(const std::string& line) { fprintf(stderr, "%s\n", line.c_str()); }

void ClientFlags::AddTo(CLI::App* app) {
  app->add_option("--address", address, "Server to talk to, host:port or unix:path")
      ->capture_default_str();
  app->add_option("--tls-ca", tls.ca,
                  "Talk TLS: PEM file of the CA that has signed the server's certificate, which "
                  "must name the host of --address")
      ->check(CLI::ExistingFile);
  app->add_option("--tls-cert", tls.cert, "PEM file of the client's own certificate (mutual TLS)")
      ->check(CLI::ExistingFile);
  app->add_option("--tls-key", tls.key, "PEM file of the key of --tls-cert")
      ->check(CLI::ExistingFile);
  app->add_option("--token-file", token_file, "File whose first line is the bearer token to send")
      ->check(CLI::ExistingFile);
  app->add_option("--connect-timeout", connect_timeout_s, "Seconds to wait for a connection")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app->add_option("--timeout", timeout_s, "Seconds that a call may take; 0 means no limit")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
}

std::shared_ptr<grpc::Channel> ClientFlags::Connect() const {
  const auto credentials = MakeChannelCredentials(tls, "--tls");
  if (!credentials.ok()) {
    Talk(absl::StrCat("error: ", credentials.status().message()));
    return nullptr;
  }
  std::vector<std::unique_ptr<ClientInterceptorFactoryInterface>> interceptors;
  if (!token_file.empty()) {
    const auto tokens = ReadTokens(token_file, "--token-file");
    if (!tokens.ok()) {
      Talk(absl::StrCat("error: ", tokens.status().message()));
      return nullptr;
    }
    interceptors.push_back(std::make_unique<TokenSenderFactory>(tokens->front()));
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  auto channel = grpc::experimental::CreateCustomChannelWithInterceptors(
      address, *credentials, arguments, std::move(interceptors));
  const absl::Time deadline = absl::Now() + absl::Seconds(connect_timeout_s);
  if (channel->WaitForConnected(absl::ToChronoTime(deadline))) return channel;
  Talk(absl::StrCat("error: cannot connect to ", address, " within ", connect_timeout_s,
                    " s; is the server running? (`lockstep serve`, or --address)"));
  return nullptr;
}

void ClientFlags::Prepare(grpc::ClientContext* context) const {
  if (timeout_s <= 0) return;
  context->set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(timeout_s)));
}

std::string ReasonOf(const grpc::Status& status) {
  google::rpc::ErrorInfo info;
  return FindDetail(status, &info) ? info.reason() : "";
}

int TellFailure(const grpc::Status& status) {
  if (status.ok()) return kExitOk;
  const std::string reason = ReasonOf(status);
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  std::string line = absl::StrCat("error: ", absl::StatusCodeToString(code));
  if (!reason.empty()) absl::StrAppend(&line, " ", reason);
  google::rpc::BadRequest bad_request;
  if (FindDetail(status, &bad_request) && bad_request.field_violations_size() > 0) {
    absl::StrAppend(&line, " (", bad_request.field_violations(0).field(), ")");
  }
  Talk(absl::StrCat(line, ": ", status.error_message()));
  if (code == absl::StatusCode::kUnavailable) {
    // The server says why it is not ready; a broken connection has no details.
    return reason.empty() ? kExitCannotConnect : kExitNotReady;
  }
  return kExitFailed;
}

std::string ReadStdin() {
  return std::string(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
}

}  // namespace cli
}  // namespace lockstep
