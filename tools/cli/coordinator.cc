// `lockstep coordinator`: see coordinator.h.
#include "tools/cli/coordinator.h"

#include <memory>
#include <string>
#include <vector>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/str_cat.h"
#include "coordinator/serve_loop.h"
#include "coordinator/serving_flags.h"
#include "kernels/base/log.h"
#include "tools/cli/common.h"

namespace lockstep {
namespace cli {
namespace {

struct Flags {
  ServingFlags serving;
  std::vector<std::string> workers;
};

int Run(const Flags& flags) {
  BlockStopSignals();
  ApplyLogLevel(flags.serving.log_level());
  SetLogRole("coordinator");
  auto options = flags.serving.Coordinator();
  if (!options.ok()) {
    Talk(absl::StrCat("error: ", options.status().message()));
    return kExitUsage;
  }
  options->workers = flags.workers;
  return RunServer(*options, flags.serving.Loop());
}

}  // namespace

void AddCoordinator(CLI::App* app, int* exit_code) {
  CLI::App* verb = app->add_subcommand(
      "coordinator", "Serve a model over workers that run already, on any machines");
  auto flags = std::make_shared<Flags>();
  flags->serving.AddTo(verb);
  verb->add_option("--workers", flags->workers, "Addresses of the workers, host:port, rank order")
      ->delimiter(',')
      ->required();
  verb->footer("Example: lockstep coordinator --model ./my-model --workers host1:7000,host2:7000");
  verb->callback([flags, exit_code]() { *exit_code = Run(*flags); });
}

}  // namespace cli
}  // namespace lockstep
