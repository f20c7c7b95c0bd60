// The flags of a process that serves: see serving_flags.h.
#include "coordinator/serving_flags.h"

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

namespace lockstep {
namespace {

bool IsLoopback(const std::string& host) {
  return host == "localhost" || host == "[::1]" || host == "::1" || host.rfind("127.", 0) == 0;
}

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
  app->add_flag("--insecure-listen", insecure_listen_,
                "Allow a --host that other machines can reach: the port has no encryption and no "
                "authentication");
  app->add_option("--address-file", address_file_,
                  "Write host:port to this file once the server listens");
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
  app->add_option("--log-level", log_level_, "Least severity of log lines on stderr")
      ->check(CLI::IsMember({"info", "warning", "error"}))
      ->capture_default_str();
}

void ServingFlags::AddWorkersTo(CLI::App* app) {
  app->add_option("--workers", workers_,
                  "Addresses of the workers in rank order: host:port or unix:path")
      ->delimiter(',')
      ->required();
}

absl::StatusOr<CoordinatorOptions> ServingFlags::Coordinator() const {
  for (const std::string& address : workers_) {
    if (IsWorkerAddress(address)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--workers: \"", address,
                     "\" is no address of a worker; give host:port with a port of 1 to 65535, "
                     "[IPv6 address]:port or unix:path"));
  }
  if (!IsLoopback(host_) && !insecure_listen_) {
    return absl::InvalidArgumentError(
        absl::StrCat("--host ", host_,
                     " can be reached by other machines without encryption or authentication; say "
                     "--insecure-listen if that is meant"));
  }
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
  options.connect_timeout = absl::Seconds(connect_timeout_s_);
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
  return options;
}

void ApplyLogLevel(const std::string& level) {
  SetLogLevel(level == "error"     ? Severity::kError
              : level == "warning" ? Severity::kWarning
                                   : Severity::kInfo);
}

}  // namespace lockstep
