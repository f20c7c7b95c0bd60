// The flags of a process that serves: see serving_flags.h.
#include "coordinator/serving_flags.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Validators.hpp"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "coordinator/journal/journal.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "security/grpc_log.h"

namespace lockstep {
namespace {

// A port of 1 to 65535 in decimal.
bool IsPort(absl::string_view text) {
  int port = 0;
  return !text.empty() && text.find_first_not_of("0123456789") == absl::string_view::npos &&
         absl::SimpleAtoi(text, &port) && port >= 1 && port <= 65535;
}

// host:port, [IPv6 address]:port or unix:path.
bool IsWorkerAddress(absl::string_view address) {
  constexpr absl::string_view kUnix = "unix:";
  if (absl::StartsWith(address, kUnix)) return address.size() > kUnix.size();
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) return false;
  const absl::string_view host = address.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return IsPort(address.substr(colon + 1)) &&
         (bracketed || host.find_first_of("[]:/ ") == absl::string_view::npos);
}

}  // namespace

void ServingFlags::AddTo(CLI::App* app) {
  app->add_option("--model", model_, "Folder of the checkpoint (config.json, *.safetensors, ...)")
      ->required();
  app->add_option("--served-model-name", names_,
                  "Name that clients ask for; more names are aliases. Default: the folder's name")
      ->delimiter(',');
  app->add_option("--host", host_, "Address to listen on")->capture_default_str();
  app->add_option("--port", port_, "Port to listen on; 0 takes any free one")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
  edges_.AddTo(app);
  app->add_option("--address-file", address_file_,
                  "Write host:port to this file once the server listens");
  app->add_option("--admin-address-file", admin_address_file_, "Likewise, of the admin service");
  app->add_option("--metrics-address-file", metrics_address_file_, "Likewise, of the metrics");
  app->add_option("--notify-socket", notify_socket_,
                  "Tell a service manager here (systemd, Type=notify)")
      ->envname("NOTIFY_SOCKET");
  app->add_option("--watchdog-usec", watchdog_usec_,
                  "Give the service manager a sign of life within this many microseconds")
      ->envname("WATCHDOG_USEC")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--watchdog-pid", watchdog_pid_,
                  "The process that --watchdog-usec is meant for. Default (0): this one")
      ->envname("WATCHDOG_PID");
  app->add_option("--max-model-len", capacity_.max_model_len,
                  "Longest prompt plus output, in tokens. Default (0): what the model can");
  app->add_option("--max-num-seqs", capacity_.max_num_seqs, "Sequences in a batch at most")
      ->capture_default_str();
  app->add_option("--max-num-batched-tokens", capacity_.max_num_batched_tokens,
                  "Tokens in a step at most; long prompts are cut into chunks of this")
      ->capture_default_str();
  app->add_option("--kv-cache-mb", capacity_.kv_cache_mb,
                  "Memory for keys and values per rank, in MiB. Default (0): enough, up to 1024");
  app->add_option(
      "--max-kv-blocks", capacity_.max_kv_blocks,
      "The same in blocks of 64 tokens; wins over --kv-cache-mb. Default (0): by --kv-cache-mb");
  app->add_option("--max-snapshots", capacity_.max_snapshots,
                  "Snapshots of recurrent state for the prefix cache")
      ->capture_default_str();
  app->add_option("--snapshot-interval", snapshot_interval_,
                  "Tokens between snapshots in a prompt; a multiple of 64")
      ->capture_default_str();
  app->add_flag("--no-prefix-cache", no_prefix_cache_, "Compute every prompt from its beginning");
  app->add_option("--activations", activations_, "Number format between layers")
      ->check(CLI::IsMember({"bf16", "f32"}))
      ->capture_default_str();
  app->add_option("--activation-quant", activation_quant_,
                  "Quantize inputs of linear layers as the checkpoint asks, or not at all")
      ->check(CLI::IsMember({"none", "checkpoint"}))
      ->capture_default_str();
  app->add_option("--max-num-queued-reqs", max_queued_requests_, "Requests that may wait")
      ->capture_default_str();
  app->add_option("--max-num-queued-tokens", max_queued_tokens_,
                  "Prompt tokens that may wait, over all requests")
      ->capture_default_str();
  app->add_option("--shutdown-timeout", shutdown_timeout_s_,
                  "Seconds that running requests get to finish after SIGTERM")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app->add_option("--connect-timeout", connect_timeout_s_, "Seconds to wait for the workers")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app->add_option("--lease-ms", lease_ms_,
                  "Milliseconds without an answer after which a worker is given up")
      ->check(CLI::Range(200, 3600000))
      ->capture_default_str();
  app->add_option("--step-timeout", step_timeout_s_,
                  "Seconds after which a step is overdue, unless recent ones took long themselves")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app->add_option("--recovery-budget", recovery_budget_,
                  "Faults within 10 minutes after which the server gives up its requests")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  app->add_option(
         "--recovery-policy", recovery_policy_,
         "What takes the place of a lost worker first: a waiting spare, or its own process "
         "started again")
      ->check(CLI::IsMember({"spare", "restart"}))
      ->capture_default_str();
  app->add_option("--state-dir", state_dir_,
                  "Folder that keeps what must outlive the server (its term and epoch)");
  app->add_option(
         "--attach-grace", attach_grace_s_,
         "Seconds that an ended request can still be attached to, and that a detachable one "
         "goes on without a reader")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app->add_option("--slow-consumer-timeout", slow_consumer_timeout_s_,
                  "Seconds without progress after which a stream ends whose client does not read, "
                  "while more than 256 events or 256 KiB wait")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app->add_option(
      "--request-journal", request_journal_,
      "Folder that keeps accepted requests and their tokens, so that a coordinator that "
      "starts with it goes on with them. Default: none");
  app->add_option(
         "--journal-fsync", journal_fsync_,
         "When the journal is made durable against the loss of the host: before a token is "
         "shown, within 50 ms, or as the system likes")
      ->check(CLI::IsMember({"step", "50ms", "off"}))
      ->capture_default_str();
  app->add_option("--log-format", log_format_, "Log lines as text or as JSON objects")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  app->add_option("--log-level", log_level_, "Least severity of log lines on stderr")
      ->check(CLI::IsMember({"info", "warning", "error"}))
      ->capture_default_str();
}

void ServingFlags::AddWorkersTo(CLI::App* app) {
  app->add_option("--workers", workers_,
                  "Addresses of the workers in rank order: host:port or unix:path")
      ->delimiter(',')
      ->required();
  app->add_option("--spare-workers", spare_workers_,
                  "Addresses of workers that wait to take the place of any that is lost")
      ->delimiter(',');
  edges_.AddWorkerTlsTo(app);
}

absl::StatusOr<CoordinatorOptions> ServingFlags::Coordinator() const {
  std::vector<std::string> all = workers_;
  all.insert(all.end(), spare_workers_.begin(), spare_workers_.end());
  for (const std::string& address : all) {
    if (IsWorkerAddress(address)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--workers: \"", address,
                     "\" is no address of a worker; give host:port with a port of 1 to 65535, "
                     "[IPv6 address]:port or unix:path"));
  }
  ASSIGN_OR_RETURN(EdgeOptions edges, edges_.Options(host_));
  for (const double seconds :
       {shutdown_timeout_s_, connect_timeout_s_, attach_grace_s_, slow_consumer_timeout_s_}) {
    if (std::isfinite(seconds)) continue;
    return absl::InvalidArgumentError(
        "--shutdown-timeout, --connect-timeout, --attach-grace and --slow-consumer-timeout must be "
        "finite");
  }
  if (max_queued_requests_ < 1 || max_queued_tokens_ < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--max-num-queued-reqs is ", max_queued_requests_,
                     " and --max-num-queued-tokens ", max_queued_tokens_,
                     "; both must be at least 1: a request waits for the next step even when the "
                     "server is idle"));
  }
  if (const absl::Status status = ValidateCapacityRequest(capacity_); !status.ok()) return status;
  for (const std::string& name : names_) {
    if (name.empty()) return absl::InvalidArgumentError("--served-model-name has an empty name");
  }
  if (snapshot_interval_ <= 0 || snapshot_interval_ % 64 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--snapshot-interval is ", snapshot_interval_,
                                                   "; it must be a positive multiple of 64"));
  }
  CoordinatorOptions options;
  options.model_path = model_;
  options.workers = workers_;
  if (!names_.empty()) {
    options.served_model_name = names_[0];
    options.model_aliases.assign(names_.begin() + 1, names_.end());
  }
  options.host = host_;
  options.port = port_;
  options.edges = std::move(edges);
  options.activation_dtype =
      activations_ == "f32" ? worker::v1::ACTIVATION_F32 : worker::v1::ACTIVATION_BF16;
  options.activation_quant = activation_quant_ == "checkpoint"
                                 ? worker::v1::ACTIVATION_QUANT_CHECKPOINT
                                 : worker::v1::ACTIVATION_QUANT_NONE;
  options.capacity = capacity_;
  options.engine.prefix_cache = !no_prefix_cache_;
  options.engine.snapshot_interval = snapshot_interval_;
  options.engine.max_queued_requests = max_queued_requests_;
  options.engine.max_queued_tokens = max_queued_tokens_;
  options.group.lease = absl::Milliseconds(lease_ms_);
  options.group.beat_period = std::min(absl::Milliseconds(500), options.group.lease / 4);
  options.group.step_timeout = absl::Seconds(step_timeout_s_);
  options.group.recovery_budget = recovery_budget_;
  options.group.prefer_spares = recovery_policy_ == "spare";
  options.group.spares = spare_workers_;
  options.state_dir = state_dir_;
  options.group.connect_timeout = absl::Seconds(connect_timeout_s_);
  options.journal.directory = request_journal_;
  options.journal.sync = journal_fsync_ == "step"  ? JournalSync::kStep
                         : journal_fsync_ == "off" ? JournalSync::kOff
                                                   : JournalSync::k50ms;
  options.journal.keep_ended = absl::Seconds(attach_grace_s_);
  options.generations.attach_grace = absl::Seconds(attach_grace_s_);
  options.generations.slow_consumer_timeout = absl::Seconds(slow_consumer_timeout_s_);
  return options;
}

ServeLoopOptions ServingFlags::Loop() const {
  ServeLoopOptions options;
  options.shutdown_timeout = absl::Seconds(shutdown_timeout_s_);
  options.address_file = address_file_;
  options.admin_address_file = admin_address_file_;
  options.metrics_address_file = metrics_address_file_;
  options.notify.socket = notify_socket_;
  if (watchdog_pid_ == 0 || watchdog_pid_ == getpid()) {
    options.notify.watchdog = absl::Microseconds(watchdog_usec_);
  }
  return options;
}

void ServingFlags::ApplyToLog() const {
  SetLogLevel(log_level_ == "error"     ? Severity::kError
              : log_level_ == "warning" ? Severity::kWarning
                                        : Severity::kInfo);
  SetLogFormat(log_format_ == "json" ? LogFormat::kJson : LogFormat::kText);
  SetLogRole("coordinator");
  SendGrpcLogsToOurs();
}

}  // namespace lockstep
