// lockstep_coordinator: serves a model over workers that run already.
#include <cstdlib>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "coordinator/serve_loop.h"
#include "coordinator/serving_flags.h"
#include "kernels/base/log.h"

namespace {

constexpr int kExitUsage = 2;

}  // namespace

int main(int argc, char** argv) {
  lockstep::BlockStopSignals();
  CLI::App app("Serves one model over gRPC. The workers (lockstep_worker) run already.");
  lockstep::ServingFlags flags;
  flags.AddTo(&app);
  flags.AddWorkersTo(&app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  flags.ApplyToLog();
  auto options = flags.Coordinator();
  if (!options.ok()) {
    lockstep::LogError(options.status().message());
    return kExitUsage;
  }
  return lockstep::RunServer(*options, flags.Loop());
}
