// The flags behind EdgeOptions: see edge_flags.h.
#include "coordinator/edge_flags.h"

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Validators.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"

namespace lockstep {

bool IsLoopback(const std::string& host) {
  return host == "localhost" || host == "[::1]" || host == "::1" || host.rfind("127.", 0) == 0;
}

void EdgeFlags::AddTo(CLI::App* app) {
  app_ = app;
  app->add_flag("--insecure-listen", insecure_listen_,
                "Allow plaintext on a --host, --admin-host or --metrics-host that other machines "
                "can reach");
  app->add_option("--unix-socket", options_.unix_socket,
                  "Listen on this path instead of on --host and --port; clients give "
                  "--address unix:PATH");
  app->add_option("--tls-cert", options_.tls.cert,
                  "Serve with TLS: PEM file of the certificate and its chain. The files of all "
                  "--tls flags are read again when they change");
  app->add_option("--tls-key", options_.tls.key, "PEM file of the key of --tls-cert");
  app->add_option("--tls-ca", options_.tls.ca,
                  "Mutual TLS: clients must have a certificate that this CA has signed");
  app->add_option("--auth-token-file", options_.token_file,
                  "Clients must send one of the bearer tokens in this file, one a line; read again "
                  "when it changes");
  app->add_option("--admin-port", options_.admin_port,
                  "Port of the admin service; 0 takes any free one. Default: no admin service")
      ->check(CLI::Range(0, 65535));
  app->add_option("--admin-host", options_.admin_host, "Address that the admin service listens on")
      ->capture_default_str();
  app->add_option("--admin-token-file", options_.admin_token_file,
                  "As --auth-token-file, for the admin service");
  app->add_option("--metrics-port", options_.metrics_port,
                  "Port of the Prometheus endpoint (/metrics); 0 takes any free one. Default: no "
                  "endpoint")
      ->check(CLI::Range(0, 65535));
  app->add_option("--metrics-host", options_.metrics_host, "Address that the metrics are served on")
      ->capture_default_str();
}

void EdgeFlags::AddWorkerTlsTo(CLI::App* app) {
  app->add_option("--worker-tls-cert", options_.worker_tls.cert,
                  "Mutual TLS with the workers: PEM file of the coordinator's certificate");
  app->add_option("--worker-tls-key", options_.worker_tls.key,
                  "PEM file of the key of --worker-tls-cert");
  app->add_option("--worker-tls-ca", options_.worker_tls.ca,
                  "CA that has signed the workers' certificates; each must name the host that "
                  "--workers gives (localhost for unix:)");
}

absl::Status EdgeFlags::CheckReach(const std::string& flag, const std::string& host,
                                   bool encrypted) const {
  if (IsLoopback(host) || encrypted || insecure_listen_) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(flag, " ", host, " can be reached by other machines and would be plaintext; ",
                   flag == "--metrics-host" ? "" : "give --tls-cert and --tls-key, or ",
                   "say --insecure-listen if that is meant"));
}

absl::StatusOr<EdgeOptions> EdgeFlags::Options(const std::string& host) const {
  const bool tls = options_.tls.any();
  if (options_.unix_socket.empty()) RETURN_IF_ERROR(CheckReach("--host", host, tls));
  if (options_.admin_port >= 0) {
    RETURN_IF_ERROR(CheckReach("--admin-host", options_.admin_host, tls));
  }
  if (options_.metrics_port >= 0) {
    RETURN_IF_ERROR(CheckReach("--metrics-host", options_.metrics_host, false));
  }
  RETURN_IF_ERROR(CheckMutual(options_.worker_tls, "--worker-tls"));
  EdgeOptions options = options_;
  for (const CLI::Option* option : app_->get_options()) {
    if (option->get_lnames().empty() || option->get_lnames()[0] == "help") continue;
    options.flags[option->get_lnames()[0]] =
        option->count() > 0 ? absl::StrJoin(option->results(), ",") : option->get_default_str();
  }
  return options;
}

}  // namespace lockstep
