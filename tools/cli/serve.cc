// `lockstep serve`: see serve.h.
#include "tools/cli/serve.h"

#include <memory>
#include <string>
#include <utility>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Validators.hpp"
#include "absl/strings/str_cat.h"
#include "coordinator/serve_loop.h"
#include "coordinator/serving_flags.h"
#include "tools/cli/common.h"
#include "tools/cli/local_workers.h"

namespace lockstep {
namespace cli {
namespace {

struct Flags {
  ServingFlags serving;
  LocalWorkersOptions workers;
};

int Run(const Flags& flags) {
  BlockStopSignals();
  flags.serving.ApplyToLog();
  auto options = flags.serving.Coordinator();
  if (!options.ok()) {
    Talk(absl::StrCat("error: ", options.status().message()));
    return kExitUsage;
  }
  LocalWorkersOptions worker_options = flags.workers;
  worker_options.log_level = flags.serving.log_level();
  worker_options.log_format = flags.serving.log_format();
  auto workers = LocalWorkers::Start(worker_options);
  if (!workers.ok()) {
    Talk(absl::StrCat("error: the workers could not be started: ", workers.status().message()));
    return kExitFailed;
  }
  options->workers = (*workers)->addresses();
  options->group.spares = (*workers)->spares();
  // "cuda:N" asks for all ranks on one GPU.
  options->group.share_devices |= flags.workers.device.find(':') != std::string::npos;
  options->launcher = [&workers](RankEventSink sink) {
    return (*workers)->MakeLauncher(std::move(sink));
  };
  return RunServer(*options, flags.serving.Loop());
}

}  // namespace

void AddServe(CLI::App* app, int* exit_code) {
  CLI::App* verb = app->add_subcommand(
      "serve", "Serve a model on this machine: starts the workers and listens for clients");
  auto flags = std::make_shared<Flags>();
  flags->serving.AddTo(verb);
  verb->add_option("--tp,--tensor-parallel-size", flags->workers.count,
                   "Workers to cut the model over: 1, 2, 4, ... as the model allows")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  verb->add_option("--spare-workers", flags->workers.spares,
                   "More workers, which wait to take the place of any that is lost")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  AddDeviceFlag(verb, &flags->workers);
  verb->add_option("--worker-threads", flags->workers.threads,
                   "Threads of each worker. Default: cores / tp")
      ->check(CLI::Range(0, 1024));
  verb->add_option("--worker-binary", flags->workers.binary,
                   "The lockstep_worker program. Default: the one beside this program");
  verb->footer("Example: lockstep serve --model ./my-model --tp 2");
  verb->callback([flags, exit_code]() { *exit_code = Run(*flags); });
}

}  // namespace cli
}  // namespace lockstep
