// lockstep: the command line of the system. One row per verb; each lives in
// tools/cli/<verb>.{h,cc}.
#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "tools/cli/admin.h"
#include "tools/cli/bench.h"
#include "tools/cli/chat.h"
#include "tools/cli/common.h"
#include "tools/cli/coordinator.h"
#include "tools/cli/eval.h"
#include "tools/cli/generate.h"
#include "tools/cli/health.h"
#include "tools/cli/serve.h"
#include "tools/cli/status.h"
#include "tools/cli/tokenize.h"
#include "tools/cli/version.h"
#include "tools/cli/worker.h"

namespace {

using AddVerb = void (*)(CLI::App* app, int* exit_code);

constexpr AddVerb kVerbs[] = {
    lockstep::cli::AddServe,    lockstep::cli::AddCoordinator, lockstep::cli::AddWorker,
    lockstep::cli::AddGenerate, lockstep::cli::AddChat,        lockstep::cli::AddTokenize,
    lockstep::cli::AddStatus,   lockstep::cli::AddHealth,      lockstep::cli::AddBench,
    lockstep::cli::AddEval,     lockstep::cli::AddAdminVerbs,  lockstep::cli::AddVersion,
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Lockstep serves quantized language models over gRPC, cut over several worker processes.\n"
      "Start with: lockstep serve --model FOLDER --tp 2, then: lockstep generate \"Hello\"");
  app.name("lockstep");
  app.footer(lockstep::cli::kExitCodesHelp);
  app.set_version_flag("--version", lockstep::cli::VersionText);
  app.require_subcommand(0, 1);
  int exit_code = lockstep::cli::kExitFailed;
  for (const AddVerb add : kVerbs) add(&app, &exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? lockstep::cli::kExitOk : lockstep::cli::kExitUsage;
  }
  if (app.get_subcommands().empty()) {
    lockstep::cli::Talk("error: which subcommand? `lockstep --help` lists them");
    return lockstep::cli::kExitUsage;
  }
  return exit_code;
}
