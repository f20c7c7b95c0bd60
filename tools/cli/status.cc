// `lockstep status`: see status.h.
#include "tools/cli/status.h"

#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <string>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Validators.hpp"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "proto/model.grpc.pb.h"
#include "tools/cli/common.h"
#include "tools/cli/output.h"

namespace lockstep {
namespace cli {
namespace {

using inference::v1::ServerStatus;

struct Flags {
  ClientFlags client;
  OutputFlag output;
  double watch_s = 0;
};

void PrintStatus(const ServerStatus& s, const inference::v1::ListModelsResponse& models) {
  std::cout << absl::StreamFormat("%-10s %s%s%s\n", "state", s.state(),
                                  s.state_detail().empty() ? "" : ": ", s.state_detail())
            << absl::StreamFormat("%-10s %s, up %d s, term %d, epoch %d\n", "server", s.version(),
                                  s.uptime_seconds(), s.term(), s.epoch());
  for (const auto& m : models.models()) {
    std::cout << absl::StreamFormat(
        "%-10s %s: %s, %s, tp %d, context %d, KV %d tokens, digest %016x\n", "model", m.name(),
        m.architecture(), m.quantization(), m.tensor_parallel(), m.max_context(),
        m.kv_capacity_tokens(), m.checkpoint_digest());
  }
  std::cout << absl::StreamFormat("%-10s %d running, %d queued\n", "requests", s.requests_running(),
                                  s.requests_queued())
            << absl::StreamFormat("%-10s %d of %d blocks free, %d cached\n", "KV cache",
                                  s.kv_blocks_free(), s.kv_blocks_total(), s.kv_blocks_cached())
            << absl::StreamFormat("%-10s %d of %d free; snapshots %d of %d used\n", "slots",
                                  s.slots_free(), s.slots_total(), s.snapshots_used(),
                                  s.snapshots_total());
  for (const auto& w : s.workers()) {
    std::cout << absl::StreamFormat(
        "%-10s rank %d at %s: %s, loaded %.0f%%, %.1f MiB, last step %d\n", "worker", w.rank(),
        w.address(), w.state(), 100 * w.load_progress(),
        static_cast<double>(w.resident_bytes()) / (1 << 20), w.last_step());
  }
  for (const auto& [name, value] :
       std::map<std::string, int64_t>(s.counters().begin(), s.counters().end())) {
    std::cout << absl::StreamFormat("%-10s %s %d\n", "counter", name, value);
  }
  std::cout << std::flush;
}

int Show(const Flags& flags, inference::v1::ModelService::Stub* stub) {
  ServerStatus server;
  inference::v1::ListModelsResponse models;
  grpc::ClientContext first, second;
  flags.client.Prepare(&first);
  flags.client.Prepare(&second);
  grpc::Status status = stub->GetServerStatus(&first, {}, &server);
  if (status.ok()) status = stub->ListModels(&second, {}, &models);
  if (!status.ok()) return TellFailure(status);
  if (flags.output.json()) {
    PrintJson(server);
  } else {
    PrintStatus(server, models);
  }
  return server.state() == "READY" ? kExitOk : kExitNotReady;
}

int Run(const Flags& flags) {
  const auto channel = flags.client.Connect();
  if (channel == nullptr) return kExitCannotConnect;
  const auto stub = inference::v1::ModelService::NewStub(channel);
  int exit_code = Show(flags, stub.get());
  while (flags.watch_s > 0 && (exit_code == kExitOk || exit_code == kExitNotReady)) {
    absl::SleepFor(absl::Seconds(flags.watch_s));
    std::cout << "\n";
    exit_code = Show(flags, stub.get());
  }
  return exit_code;
}

}  // namespace

void AddStatus(CLI::App* app, int* exit_code) {
  CLI::App* verb =
      app->add_subcommand("status", "Show the server, its workers, its queue and its counters");
  auto flags = std::make_shared<Flags>();
  flags->client.AddTo(verb);
  flags->output.AddTo(verb);
  verb->add_flag_callback(
      "--json", [flags]() { flags->output.format = "json"; }, "The same as --output json");
  verb->add_option("--watch", flags->watch_s, "Print again every this many seconds")
      ->check(CLI::PositiveNumber);
  verb->callback([flags, exit_code]() { *exit_code = Run(*flags); });
}

}  // namespace cli
}  // namespace lockstep
