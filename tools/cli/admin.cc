// The verbs of operators: see admin.h.
#include "tools/cli/admin.h"

#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Validators.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/admin.grpc.pb.h"
#include "tools/cli/common.h"
#include "tools/cli/output.h"

namespace lockstep {
namespace cli {
namespace {

using admin::v1::AdminService;
using Stub = AdminService::Stub;

constexpr char kDefaultAddress[] = "127.0.0.1:50052";

struct Flags {
  Flags() { client.address = kDefaultAddress; }
  ClientFlags client;
  OutputFlag output;
  // Of single verbs.
  std::string request_id;
  std::string reason;
  std::string worker_id;
  std::string level;
  int rank = 0;
  int limit = 0;
  double wait_s = 0;
};

// One call and its answer, printed as JSON or by `table`.
template <typename Request, typename Response, typename Table>
int Call(const Flags& flags, Stub* stub,
         grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
         const Request& request, const Table& table) {
  grpc::ClientContext context;
  flags.client.Prepare(&context);
  Response response;
  const grpc::Status status = (stub->*method)(&context, request, &response);
  if (!status.ok()) return TellFailure(status);
  if (flags.output.json()) {
    PrintJson(response);
  } else {
    table(response);
  }
  return kExitOk;
}

// Until nothing is queued or running.
int WaitDrained(const Flags& flags, Stub* stub) {
  const absl::Time deadline = absl::Now() + absl::Seconds(flags.wait_s);
  while (true) {
    grpc::ClientContext context;
    flags.client.Prepare(&context);
    admin::v1::GetStatsResponse response;
    const grpc::Status status = stub->GetStats(&context, {}, &response);
    if (!status.ok()) return TellFailure(status);
    const int64_t left = response.status().requests_running() + response.status().requests_queued();
    if (left == 0) return kExitOk;
    if (absl::Now() >= deadline) {
      Talk(absl::StrCat("error: ", left, " requests are left after ", flags.wait_s, " s"));
      return kExitNotReady;
    }
    absl::SleepFor(absl::Milliseconds(100));
  }
}

int Drain(const Flags& flags, Stub* stub) {
  const int code = Call(flags, stub, &Stub::Drain, admin::v1::DrainRequest(), [](const auto& r) {
    std::cout << "draining: " << r.requests_left() << " requests are left" << std::endl;
  });
  return code == kExitOk && flags.wait_s > 0 ? WaitDrained(flags, stub) : code;
}

int Undrain(const Flags& flags, Stub* stub) {
  return Call(flags, stub, &Stub::Undrain, admin::v1::UndrainRequest(), [](const auto& r) {
    std::cout << (r.ready() ? "ready" : "takes requests again, but is not ready") << std::endl;
  });
}

int Cancel(const Flags& flags, Stub* stub) {
  admin::v1::CancelRequestRequest request;
  request.set_request_id(flags.request_id);
  request.set_reason(flags.reason);
  return Call(flags, stub, &Stub::CancelRequest, request, [](const auto& r) {
    std::cout << admin::v1::CancelRequestResponse::Outcome_Name(r.outcome()) << std::endl;
  });
}

int Requests(const Flags& flags, Stub* stub) {
  return Call(
      flags, stub, &Stub::ListRequests, admin::v1::ListRequestsRequest(), [](const auto& r) {
        std::vector<std::vector<std::string>> rows = {{"REQUEST", "STATE", "AGE", "PROMPT",
                                                       "CACHED", "GENERATED", "OUTPUTS", "PRIORITY",
                                                       "PREEMPTIONS"}};
        for (const auto& one : r.requests()) {
          rows.push_back({one.request_id(), admin::v1::Request::State_Name(one.state()),
                          absl::FormatDuration(absl::Milliseconds(one.age_ms())),
                          absl::StrCat(one.prompt_tokens()), absl::StrCat(one.cached_tokens()),
                          absl::StrCat(one.generated_tokens()), absl::StrCat(one.outputs()),
                          absl::StrCat(one.priority()), absl::StrCat(one.preemptions())});
        }
        PrintTable(rows);
      });
}

int Workers(const Flags& flags, Stub* stub) {
  return Call(flags, stub, &Stub::ListWorkers, admin::v1::ListWorkersRequest(), [](const auto& r) {
    std::vector<std::vector<std::string>> rows = {
        {"RANK", "ADDRESS", "STATE", "UP", "LEASE AGE", "LOADED", "WORKER", "DETAIL"}};
    for (const auto& one : r.workers()) {
      rows.push_back({absl::StrCat(one.rank()), one.address(), one.state(), one.up() ? "yes" : "no",
                      one.lease_age_ms() < 0
                          ? "never"
                          : absl::FormatDuration(absl::Milliseconds(one.lease_age_ms())),
                      absl::StrFormat("%.0f%%", 100 * one.load_progress()), one.worker_id(),
                      one.state_detail()});
    }
    PrintTable(rows);
  });
}

std::string PhasesText(const admin::v1::FaultPhases& phases) {
  return absl::StrFormat("%.2f %.2f %.2f %.2f %.2f %.2f", phases.detect(), phases.abort(),
                         phases.replace(), phases.load(), phases.join(), phases.replay());
}

int Faults(const Flags& flags, Stub* stub) {
  admin::v1::ListFaultsRequest request;
  request.set_limit(flags.limit);
  return Call(flags, stub, &Stub::ListFaults, request, [](const auto& r) {
    std::vector<std::vector<std::string>> rows = {
        {"ID", "START", "CAUSE", "RANKS", "EPOCHS", "OUTCOME",
         "DETECT ABORT REPLACE LOAD JOIN REPLAY (s)", "REPLAYED", "TOKENS", "DETAIL"}};
    for (const auto& one : r.faults()) {
      rows.push_back(
          {absl::StrCat(one.id()),
           absl::FormatTime("%Y-%m-%d %H:%M:%E3S", absl::FromUnixMillis(one.start_unix_ms()),
                            absl::LocalTimeZone()),
           one.cause(), absl::StrJoin(one.ranks(), ","),
           absl::StrCat(one.epoch_before(), ">", one.epoch_after()),
           admin::v1::FaultOutcome_Name(one.outcome()), PhasesText(one.phases()),
           absl::StrCat(one.requests_replayed()), absl::StrCat(one.tokens_recomputed()),
           one.detail()});
    }
    PrintTable(rows);
  });
}

int ReplaceWorker(const Flags& flags, Stub* stub) {
  admin::v1::ReplaceWorkerRequest request;
  request.set_rank(flags.rank);
  request.set_worker_id(flags.worker_id);
  request.set_reason(flags.reason);
  return Call(flags, stub, &Stub::ReplaceWorker, request, [&flags](const auto&) {
    std::cout << "the worker of rank " << flags.rank
              << " is being replaced; `lockstep faults` tells how it goes" << std::endl;
  });
}

int ResetPrefixCache(const Flags& flags, Stub* stub) {
  return Call(
      flags, stub, &Stub::ResetPrefixCache, admin::v1::ResetPrefixCacheRequest(),
      [](const auto& r) { std::cout << r.blocks_freed() << " blocks became free" << std::endl; });
}

int LogLevel(const Flags& flags, Stub* stub) {
  admin::v1::SetLogLevelRequest request;
  request.set_level(flags.level);
  return Call(flags, stub, &Stub::SetLogLevel, request, [&flags](const auto& r) {
    std::cout << r.previous() << " -> " << flags.level << std::endl;
  });
}

int ServerInfo(const Flags& flags, Stub* stub) {
  return Call(
      flags, stub, &Stub::GetServerInfo, admin::v1::GetServerInfoRequest(), [](const auto& r) {
        const auto& limits = r.limits();
        std::vector<std::vector<std::string>> rows = {
            {"version", r.version()},
            {"state",
             absl::StrCat(r.state(), r.state_detail().empty() ? "" : ": ", r.state_detail())},
            {"term, epoch", absl::StrCat(r.term(), ", ", r.epoch())},
            {"address", r.address()},
            {"log level", r.log_level()},
            {"message bytes", absl::StrCat(limits.max_public_message_bytes(), " public, ",
                                           limits.max_worker_message_bytes(), " to workers")},
            {"context", absl::StrCat(limits.max_context())},
            {"batch", absl::StrCat(limits.max_batch_sequences(), " sequences, ",
                                   limits.max_batch_tokens(), " tokens")},
            {"KV capacity", absl::StrCat(limits.kv_capacity_tokens(), " tokens")},
            {"queue", absl::StrCat(limits.max_queued_requests(), " requests, ",
                                   limits.max_queued_tokens(), " tokens")}};
        for (const auto& [name, value] :
             std::map<std::string, std::string>(r.flags().begin(), r.flags().end())) {
          rows.push_back({absl::StrCat("--", name), value});
        }
        PrintTable(rows);
      });
}

// A verb whose `run` has a connected stub.
std::shared_ptr<Flags> AddVerb(CLI::App* app, int* exit_code, const char* name, const char* help,
                               int (*run)(const Flags& flags, Stub* stub), CLI::App** verb_out) {
  CLI::App* verb = app->add_subcommand(name, help);
  auto flags = std::make_shared<Flags>();
  flags->client.AddTo(verb);
  flags->output.AddTo(verb);
  verb->footer("Talks to the admin service (--admin-port of the server).");
  verb->callback([flags, run, exit_code]() {
    const auto channel = flags->client.Connect();
    if (channel == nullptr) {
      *exit_code = kExitCannotConnect;
      return;
    }
    *exit_code = run(*flags, AdminService::NewStub(channel).get());
  });
  *verb_out = verb;
  return flags;
}

}  // namespace

void AddAdminVerbs(CLI::App* app, int* exit_code) {
  CLI::App* verb = nullptr;
  auto flags = AddVerb(app, exit_code, "drain",
                       "Have a server refuse new requests while running ones go on", Drain, &verb);
  verb->add_option("--wait", flags->wait_s,
                   "Seconds to wait until nothing runs any more; exit code 4 when something does")
      ->check(CLI::NonNegativeNumber);
  AddVerb(app, exit_code, "undrain", "Have a server take requests again", Undrain, &verb);
  flags = AddVerb(app, exit_code, "cancel", "End a request of any client", Cancel, &verb);
  verb->add_option("request_id", flags->request_id, "Its id")->required();
  verb->add_option("--reason", flags->reason, "Told to the client");
  AddVerb(app, exit_code, "requests", "List what is queued and running", Requests, &verb);
  AddVerb(app, exit_code, "workers", "List the workers and their leases", Workers, &verb);
  flags = AddVerb(app, exit_code, "faults", "List failures of workers and their recoveries", Faults,
                  &verb);
  verb->add_option("--limit", flags->limit, "The newest so many. Default (0): all that are kept")
      ->check(CLI::NonNegativeNumber);
  flags = AddVerb(app, exit_code, "replace-worker", "Have the worker of a rank replaced",
                  ReplaceWorker, &verb);
  verb->add_option("rank", flags->rank, "Whose")->required()->check(CLI::NonNegativeNumber);
  verb->add_option("--worker-id", flags->worker_id, "Only if this is its worker now");
  verb->add_option("--reason", flags->reason, "Kept in the log");
  AddVerb(app, exit_code, "reset-prefix-cache", "Have a server forget all cached prefixes",
          ResetPrefixCache, &verb);
  flags = AddVerb(app, exit_code, "log-level", "Change what a server logs", LogLevel, &verb);
  verb->add_option("level", flags->level, "info, warning or error")
      ->required()
      ->check(CLI::IsMember({"info", "warning", "error"}));
  AddVerb(app, exit_code, "server-info", "Show limits and flags of a server", ServerInfo, &verb);
}

}  // namespace cli
}  // namespace lockstep
