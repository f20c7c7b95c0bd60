// `lockstep worker`: see worker.h.
#include "tools/cli/worker.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/str_cat.h"
#include "tools/cli/common.h"
#include "tools/cli/local_workers.h"

namespace lockstep {
namespace cli {
namespace {

// Becomes the worker program: returns only when that fails.
int Run(const std::vector<std::string>& arguments) {
  const auto binary = FindWorkerBinary();
  if (!binary.ok()) {
    Talk(absl::StrCat("error: ", binary.status().message()));
    return kExitFailed;
  }
  std::vector<std::string> strings = {*binary};
  strings.insert(strings.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& text : strings) argv.push_back(text.data());
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  Talk(absl::StrCat("error: cannot run ", *binary, ": ", strerror(errno)));
  return kExitFailed;
}

}  // namespace

void AddWorker(CLI::App* app, int* exit_code) {
  CLI::App* verb =
      app->add_subcommand("worker", "Run one worker process; its flags: lockstep worker --help");
  // Every argument, --help too, is the worker program's.
  verb->set_help_flag();
  verb->prefix_command();
  verb->callback([verb, exit_code]() { *exit_code = Run(verb->remaining()); });
}

}  // namespace cli
}  // namespace lockstep
