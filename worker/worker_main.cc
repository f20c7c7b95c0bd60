// One rank of a model, serving WorkerService. See --help.
#include "worker/worker_main.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/version.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/device_stream.h"
#include "security/grpc_log.h"
#include "security/tls.h"
#include "worker/model_loader.h"
#include "worker/worker.h"
#include "worker/worker_service.h"

namespace lockstep {
namespace {

constexpr int kExitUsage = 2;
// Plans are small; a replay of a long prompt is a few hundred kilobytes.
constexpr int kMaxMessageBytes = 256 << 20;

struct Flags {
  std::string listen = "127.0.0.1:0";
  int threads = 0;
  std::string device = "cpu";
  std::string address_file;
  bool parent_death = false;
  double orphan_timeout = 0;
  bool insecure_listen = false;
  std::string log_level = "info";
  std::string log_format = "text";
  TlsFiles tls;
};

void AddFlags(CLI::App* app, Flags* flags) {
  app->set_version_flag("--version", std::string("lockstep_worker ") + kVersion);
  app->add_option("--listen", flags->listen,
                  "Address to serve on: host:port (port 0: any free one) or unix:path")
      ->capture_default_str();
  app->add_option("--threads", flags->threads,
                  "Threads to compute with; 0: the hardware's, divided by the ranks of the model")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app->add_option("--device", flags->device,
                  "Device to compute on: cpu, cuda (the first) or cuda:N")
      ->capture_default_str();
  app->add_option("--address-file", flags->address_file,
                  "File that gets the address once the worker listens");
  app->add_flag("--parent-death", flags->parent_death, "Stop when the parent process dies");
  app->add_option("--orphan-timeout", flags->orphan_timeout,
                  "Seconds without a coordinator after which the worker stops; 0: never")
      ->check(CLI::Range(0.0, 1e9))
      ->capture_default_str();
  app->add_flag("--insecure-listen", flags->insecure_listen,
                "Allow plaintext on an address that other hosts can reach");
  app->add_option("--tls-cert", flags->tls.cert,
                  "Mutual TLS with the coordinator: PEM file of the worker's certificate, which "
                  "must name the host that the coordinator calls; all three --tls flags or none. "
                  "The files are read again when they change");
  app->add_option("--tls-key", flags->tls.key, "PEM file of the key of --tls-cert");
  app->add_option("--tls-ca", flags->tls.ca,
                  "CA of the coordinator: who has no certificate of it is refused");
  app->add_option("--log-format", flags->log_format, "Log lines as text or as JSON objects")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  app->add_option("--log-level", flags->log_level, "Least severe lines to log")
      ->check(CLI::IsMember({"info", "warning", "error"}))
      ->capture_default_str();
}

bool IsLocal(const std::string& listen) {
  return absl::StartsWith(listen, "unix:") || absl::StartsWith(listen, "127.") ||
         absl::StartsWith(listen, "localhost:") || absl::StartsWith(listen, "[::1]:");
}

// Complete or not there at all: written aside, then renamed.
bool WriteAddressFile(const std::string& path, const std::string& address) {
  const std::string aside = absl::StrCat(path, ".", getpid());
  {
    std::ofstream out(aside);
    out << address << "\n";
    out.close();
    if (!out) return false;
  }
  return std::rename(aside.c_str(), path.c_str()) == 0;
}

sigset_t StopSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

// Waits for a signal to stop; lets the step that runs end; a second signal ends the process at
// once.
void ServeUntilStopped(Worker* worker, grpc::Server* server) {
  const sigset_t signals = StopSignals();
  int signal = 0;
  sigwait(&signals, &signal);
  LogInfo("signal ", signal, ": draining");
  std::thread([signals] {
    int second = 0;
    sigwait(&signals, &second);
    LogWarning("signal ", second, " again: stopping at once");
    _exit(128 + second);
  }).detach();
  worker::v1::DrainRequest request;
  request.set_timeout_ms(10000);
  request.set_term(worker->GetInfo().identity().term());
  const absl::Status drained = worker->Drain(request).status();
  if (!drained.ok()) LogWarning("drain: ", drained.message());
  server->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(2));
}

// "cpu", "cuda", "cuda:3".
bool ParseDevice(const std::string& text, DeviceType* device, int* ordinal) {
  *ordinal = 0;
  *device = text == "cpu" ? DeviceType::kCpu : DeviceType::kCuda;
  if (text == "cpu" || text == "cuda") return true;
  return absl::StartsWith(text, "cuda:") && absl::SimpleAtoi(text.substr(5), ordinal) &&
         *ordinal >= 0;
}

int Serve(const Flags& flags, const WorkerMainHooks& hooks) {
  WorkerOptions options;
  if (!ParseDevice(flags.device, &options.device, &options.device_ordinal)) {
    LogError("--device ", flags.device, " is none of cpu, cuda, cuda:N");
    return kExitUsage;
  }
  const absl::Status selected = SelectDevice(options.device, options.device_ordinal);
  if (!selected.ok()) {
    LogError("--device ", flags.device, ": ", selected.message());
    return 1;
  }
  char host[256] = "localhost";
  gethostname(host, sizeof(host) - 1);
  options.worker_id = absl::StrCat(host, "/", flags.device, "/", flags.listen);
  options.threads = flags.threads;
  options.loader = LoadCheckpointModel;
  if (hooks.wrap_loader) options.loader = hooks.wrap_loader(options.loader);
  options.orphan_timeout = absl::Seconds(flags.orphan_timeout);
  options.on_orphan = [timeout = options.orphan_timeout] {
    LogInfo("no coordinator was heard of for ", absl::FormatDuration(timeout), ": stopping");
    kill(getpid(), SIGTERM);  // the orderly way
  };
  Worker worker(options);
  const std::unique_ptr<grpc::Service> service = hooks.make_service
                                                     ? hooks.make_service(&worker)
                                                     : std::make_unique<WorkerServiceImpl>(&worker);

  const absl::Status mutual = CheckMutual(flags.tls, "--tls");
  const auto credentials = MakeServerCredentials(flags.tls, "--tls");
  if (!mutual.ok() || !credentials.ok()) {
    LogError(mutual.ok() ? credentials.status().message() : mutual.message());
    return mutual.ok() ? 1 : kExitUsage;
  }
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  int port = 0;
  // Two workers on one port would take each other's calls.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.AddListeningPort(flags.listen, *credentials, &port);
  builder.RegisterService(service.get());
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  const bool is_unix = absl::StartsWith(flags.listen, "unix:");
  if (server == nullptr || (port == 0 && !is_unix)) {
    LogError("cannot listen on ", flags.listen,
             ": the address is in use or not available; choose another --listen");
    return 1;
  }
  const std::string address =
      is_unix ? flags.listen
              : absl::StrCat(flags.listen.substr(0, flags.listen.rfind(':') + 1), port);
  if (!flags.address_file.empty() && !WriteAddressFile(flags.address_file, address)) {
    LogError("cannot write --address-file ", flags.address_file);
    return 1;
  }
  const absl::StatusOr<DeviceInfo> device = GetDeviceInfo(options.device);
  LogInfo("lockstep_worker ", kVersion, " on ", flags.device, " (",
          options.device == DeviceType::kCpu ? Name(GetCpuIsa())
          : device.ok()                      ? device->name
                                             : device.status().ToString(),
          ") listens on ", address);
  ServeUntilStopped(&worker, server.get());
  return 0;
}

}  // namespace

int WorkerMain(int argc, char** argv, const WorkerMainHooks& hooks) {
  Flags flags;
  CLI::App app("One rank of a model: holds its shard and runs the steps that a coordinator sends.");
  AddFlags(&app, &flags);
  if (hooks.add_flags) hooks.add_flags(&app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  SetLogRole("worker");
  SetLogFormat(flags.log_format == "json" ? LogFormat::kJson : LogFormat::kText);
  SendGrpcLogsToOurs();
  if (flags.log_level == "warning") SetLogLevel(Severity::kWarning);
  if (flags.log_level == "error") SetLogLevel(Severity::kError);
  if (!IsLocal(flags.listen) && !flags.insecure_listen && !flags.tls.any()) {
    LogError("--listen ", flags.listen,
             " can be reached by other hosts and is not encrypted; use a loopback address, give "
             "--tls-cert, --tls-key and --tls-ca, or add --insecure-listen");
    return 1;
  }
  const pid_t parent = getppid();
  if (flags.parent_death) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) return 0;  // it died meanwhile
  }
  signal(SIGPIPE, SIG_IGN);
  // Blocked before any thread starts, so that only sigwait sees them.
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return Serve(flags, hooks);
}

}  // namespace lockstep
