// `lockstep coordinator`: see coordinator.h.
#include "tools/cli/coordinator.h"

#include <memory>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/str_cat.h"
#include "coordinator/serve_loop.h"
#include "coordinator/serving_flags.h"
#include "tools/cli/common.h"

namespace lockstep {
namespace cli {
namespace {

int Run(const ServingFlags& flags) {
  BlockStopSignals();
  flags.ApplyToLog();
  auto options = flags.Coordinator();
  if (!options.ok()) {
    Talk(absl::StrCat("error: ", options.status().message()));
    return kExitUsage;
  }
  return RunServer(*options, flags.Loop());
}

}  // namespace

void AddCoordinator(CLI::App* app, int* exit_code) {
  CLI::App* verb = app->add_subcommand(
      "coordinator", "Serve a model over workers that run already, on any machines");
  auto flags = std::make_shared<ServingFlags>();
  flags->AddTo(verb);
  flags->AddWorkersTo(verb);
  verb->footer("Example: lockstep coordinator --model ./my-model --workers host1:7000,host2:7000");
  verb->callback([flags, exit_code]() { *exit_code = Run(*flags); });
}

}  // namespace cli
}  // namespace lockstep
