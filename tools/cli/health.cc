// `lockstep health`: see health.h.
#include "tools/cli/health.h"

#include <iostream>
#include <memory>
#include <string>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Validators.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/health.grpc.pb.h"
#include "tools/cli/common.h"

namespace lockstep {
namespace cli {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

struct Flags {
  ClientFlags client;
  std::string service;
  double wait_s = 0;
};

// Follows the state until it is SERVING or the time is over.
int Watch(const Flags& flags, grpc::health::v1::Health::Stub* stub) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(flags.wait_s)));
  HealthCheckRequest request;
  request.set_service(flags.service);
  auto reader = stub->Watch(&context, request);
  HealthCheckResponse response;
  while (reader->Read(&response)) {
    if (response.status() != HealthCheckResponse::SERVING) continue;
    context.TryCancel();
    std::cout << "SERVING" << std::endl;
    return kExitOk;
  }
  const grpc::Status status = reader->Finish();
  if (status.error_code() != grpc::StatusCode::DEADLINE_EXCEEDED) return TellFailure(status);
  std::cout << HealthCheckResponse::ServingStatus_Name(response.status()) << std::endl;
  return kExitNotReady;
}

int Check(const Flags& flags, grpc::health::v1::Health::Stub* stub) {
  grpc::ClientContext context;
  flags.client.Prepare(&context);
  HealthCheckRequest request;
  request.set_service(flags.service);
  HealthCheckResponse response;
  const grpc::Status status = stub->Check(&context, request, &response);
  if (!status.ok()) return TellFailure(status);
  std::cout << HealthCheckResponse::ServingStatus_Name(response.status()) << std::endl;
  return response.status() == HealthCheckResponse::SERVING ? kExitOk : kExitNotReady;
}

int Run(const Flags& flags) {
  ClientFlags client = flags.client;
  if (flags.wait_s > client.connect_timeout_s) client.connect_timeout_s = flags.wait_s;
  const auto channel = client.Connect();
  if (channel == nullptr) return kExitCannotConnect;
  const auto stub = grpc::health::v1::Health::NewStub(channel);
  return flags.wait_s > 0 ? Watch(flags, stub.get()) : Check(flags, stub.get());
}

}  // namespace

void AddHealth(CLI::App* app, int* exit_code) {
  CLI::App* verb =
      app->add_subcommand("health", "Ask whether a server is ready: exit code 0, or 4 when not");
  auto flags = std::make_shared<Flags>();
  flags->client.AddTo(verb);
  verb->add_option("--service", flags->service,
                   "What to ask for: \"\" (readiness), liveness, worker/<rank>");
  verb->add_option("--wait", flags->wait_s, "Seconds to wait until it is ready")
      ->check(CLI::NonNegativeNumber);
  verb->callback([flags, exit_code]() { *exit_code = Run(*flags); });
}

}  // namespace cli
}  // namespace lockstep
